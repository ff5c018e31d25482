"""Attention over the paged cache, native and torch's, in alternating calls.

    python tests/bench/bench_attention.py [--threads 2] [--seconds 1.0] [--only decode|prefill]
    [--dtype bfloat16]

Decode by batch and context, prefill by length.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from quire.kernels import registry
from quire.kernels.cpu.native.library import library
from quire.kernels.ops import AttentionMetadata

MODELS = {"0.5B": (14, 2, 64), "16M": (6, 2, 64)}  # query heads, KV heads, head_dim
BATCHES, CONTEXTS, PROMPTS = (1, 8, 32), (128, 1024, 4096, 16384), (512, 2048, 4096)
BLOCK_SIZE = 16


def metadata_of(query_len: int, contexts: list[int]) -> AttentionMetadata:
    """Requests with `query_len` tokens each, their blocks in random order."""
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    pages = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
    query_lens = [query_len] * len(contexts)
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    slots = torch.zeros(sum(query_lens), dtype=torch.int64)
    num_decodes = len(contexts) if query_len == 1 else 0
    return AttentionMetadata(
        starts,
        torch.tensor(contexts, dtype=torch.int32),
        tables,
        slots,
        num_decodes,
        query_lens,
        contexts,
    )


def measure(
    heads: tuple[int, int, int],
    query_len: int,
    contexts: list[int],
    dtype: torch.dtype,
    seconds: float,
) -> dict[str, list[float]]:
    num_heads, num_kv_heads, head_dim = heads
    metadata = metadata_of(query_len, contexts)
    query = torch.randn(
        query_len * len(contexts), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype
    )[:, :num_heads]
    # Enough layers that the caches exceed the processor's: a step reads each layer's keys from
    # memory.
    slots = sum(-(-context // BLOCK_SIZE) for context in contexts) * BLOCK_SIZE
    layers = max(1, min(24, 2**27 // (slots * 2 * num_kv_heads * head_dim * dtype.itemsize)))
    caches = torch.randn(
        layers, 2, slots // BLOCK_SIZE, BLOCK_SIZE, num_kv_heads, head_dim, dtype=dtype
    )
    functions = {
        i.name: i.function
        for i in registry.implementations("paged_attention")
        if i.name in ("native", "cpu")
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, function in functions.items():
            metadata.scratch.clear()
            for key_cache, value_cache in caches:
                start = time.perf_counter()
                function(query, key_cache, value_cache, metadata, head_dim**-0.5)
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    print(f"{library.isa}, {args.threads} threads, {args.dtype}; ms per call: least, median")
    for model, heads in MODELS.items():
        if args.model not in (None, model):
            continue
        rows = [
            (f"decode {batch} x {context}", 1, [context] * batch)
            for batch in BATCHES
            for context in CONTEXTS
            if batch * context <= 2**18
        ]
        rows += [(f"prefill {prompt}", prompt, [prompt]) for prompt in PROMPTS]
        for name, query_len, contexts in rows:
            if args.only and args.only not in name:
                continue
            times = measure(heads, query_len, contexts, dtype, args.seconds)
            (native, native_median), (own, own_median) = (
                (min(t) * 1e3, statistics.median(t) * 1e3) for t in (times["native"], times["cpu"])
            )
            if query_len == 1:
                num_bytes = sum(contexts) * heads[1] * heads[2] * 2 * dtype.itemsize
                rate = f"{num_bytes / native / 1e6:7.1f} GB/s"
            else:
                rate = f"{2 * query_len**2 * heads[0] * heads[2] / native / 1e6:7.1f} GFLOP/s"
            ratios = f"torch / native {own / native:5.2f} {own_median / native_median:5.2f}"
            print(
                f"{model:5} {name:16} native {native:8.3f} {native_median:8.3f}  torch {own:8.3f} "
                f"{own_median:8.3f}  {ratios}  {rate}",
                flush=True,
            )


if __name__ == "__main__":
    main()
