"""Decode steps of one request over long contexts, beside what the memory allows.

    python tests/bench/bench_long_context.py [--model DIRECTORY] [--quantization int8]
        [--contexts 1024 16384 32768 131072] [--cache-dtypes auto int8] [--threads 2] [--rounds 9]

Weights and cache are random; nothing is computed to fill the cache. Steps of all cache dtypes and
contexts take turns, with a plain reading of memory after each. `read` is what a step has to read of
weights and cache, `share` its speed relative to the plain reading of the same round.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from quire.executor.worker import Worker
from quire.frontend import bundled_model
from quire.kernels.ops import AttentionMetadata
from quire.tests.bench.report import hardware
from quire.tests.executor.driver import start_executor

BLOCK_SIZE = 16
SHAPE_500M = {  # of Qwen2.5-0.5B
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151936,
}


def make_step(context: int) -> tuple[Any, ...]:
    num_blocks = -(-context // BLOCK_SIZE)
    blocks = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]
    last = torch.tensor([context - 1])
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=blocks,
        slot_mapping=blocks[0, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        num_decodes=1,
        query_lens=[1],
        seq_lens_list=[context],
    )
    return torch.zeros(1, dtype=torch.int32), last, metadata, torch.zeros(1, dtype=torch.int64)


def caches(executor: Worker) -> list[torch.Tensor]:
    layers = executor.model.attention_layers()
    return [part for layer in layers for part in (layer.key_cache, layer.value_cache)]


def fill(executor: Worker) -> None:
    """Writes random numbers: pages that nobody has written are read from one page."""
    for cache in caches(executor):
        if cache.dtype == torch.int8:
            # also the bytes of scales, of which a positive one is small
            cache.random_(1, 60)
        else:
            cache.normal_()


def bytes_of_cache(executor: Worker, context: int) -> int:
    return sum(cache[0].nbytes * context // BLOCK_SIZE for cache in caches(executor))


def read_rate(data: torch.Tensor) -> float:
    """Bytes per second of a plain reading."""
    start = perf_counter()
    data.sum()
    return data.nbytes / (perf_counter() - start)


def start(args: argparse.Namespace, cache_dtype: str) -> Worker:
    longest = max(args.contexts)
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": longest,
        "kv_cache_dtype": cache_dtype,
        "kv_cache_memory_bytes": 2**30 + 2 * longest * 2**14,
        "num_gpu_blocks_override": longest // BLOCK_SIZE + 2,
        "max_num_seqs": 1,
        "num_threads": args.threads,
    }
    if args.quantization:
        settings["quantization"] = args.quantization
    if args.model is None:
        settings |= {"hf_overrides": SHAPE_500M, "load_format": "dummy"}
    executor = start_executor(args.model or Path(bundled_model.__file__).parent, **settings)
    fill(executor)
    return executor


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: random weights, Qwen2.5-0.5B's shape")
    parser.add_argument("--quantization")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 16384, 32768, 131072])
    parser.add_argument("--cache-dtypes", nargs="+", default=["auto", "int8"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"{hardware()}, {args.threads} threads")
    torch.set_num_threads(args.threads)
    plain = torch.zeros(2**26, dtype=torch.int64)
    executors = {name: start(args, name) for name in args.cache_dtypes}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for context in args.contexts:
            for name, executor in executors.items():
                step, program = make_step(context), executor.runner.program
                program(*step)  # whatever was read before
                begin = perf_counter()
                program(*step)
                seconds = perf_counter() - begin
                times.setdefault((name, context), []).append((seconds, read_rate(plain)))
    print("| context | cache | ms | tokens/s | GB | GB/s | plain reading, GB/s | share |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, context), found in sorted(times.items(), key=lambda item: item[0][1]):
        executor = executors[name]
        weights = executor.memory_usage()["weights_bytes"]
        num_bytes = weights + bytes_of_cache(executor, context)
        seconds = statistics.median(one for one, _ in found)
        share = statistics.median(num_bytes / one / rate for one, rate in found)
        rate = statistics.median(rate for _, rate in found)
        print(
            f"| {context} | {name} | {1e3 * seconds:.1f} | {1 / seconds:.1f} | "
            f"{num_bytes / 1e9:.2f} | {num_bytes / seconds / 1e9:.1f} | {rate / 1e9:.1f} | "
            f"{share:.2f} |"
        )


if __name__ == "__main__":
    main()
