"""A text encoder's step as one native call: time, and the share of each kernel.

    python tests/bench/bench_encoder.py [--shape minilm|bge-small] [--dtype bfloat16] [--bits 8]
    [--threads 2] [--seconds 1.0]

32 texts of 16 tokens, 32 of 256, and one of 12, with random weights. With `chrt -f 10` before it,
other programs do not interrupt a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace

import torch
from quire.executor.model import TextEncoder
from quire.executor.program.step_program import record_step
from quire.kernels import registry
from quire.kernels.cpu.native.library import library
from quire.kernels.cpu.native.recorder import Limits
from quire.kernels.cpu.native.timing import CallTimer, timed_calls
from quire.kernels.ops import make_metadata
from quire.kernels.registry import OpTable

# layers, hidden size, inner size, heads
SHAPES = {"minilm": (6, 384, 1536, 12), "bge-small": (12, 384, 1536, 12)}
PROFILES = {"32 x 16": [16] * 32, "32 x 256": [256] * 32, "1 x 12": [12]}


class Encoder(TextEncoder):
    """BERT's layers with random weights."""

    num_token_types = 2
    config = SimpleNamespace(vocab_size=30522)

    def __init__(self, ops: OpTable, shape: str, dtype: torch.dtype, bits: int | None):
        num_layers, size, inner, self.heads = SHAPES[shape]

        def random(*sizes: int) -> torch.Tensor:
            return (torch.randn(sizes) / sizes[-1] ** 0.5).to(dtype)

        def linear(columns_out: int, columns_in: int):
            weights = random(columns_out, columns_in), random(columns_out)
            if bits is None:
                return ops.pack_linear(*weights)
            return ops.pack_quantized_linear(*weights, bits)

        self.ops, self.norm = ops, (torch.ones(size, dtype=dtype), random(size))
        self.tables = random(30522, size), random(512, size), random(2, size)
        sizes = (3 * size, size), (size, size), (inner, size), (size, inner)
        self.layers = [[linear(*pair) for pair in sizes] for _ in range(num_layers)]
        self.num_weights = num_layers * sum(a * b for a, b in sizes)

    def __call__(self, token_ids, positions, metadata, token_types):
        ops = self.ops
        words, places, types = self.tables
        x = ops.embedding(token_ids, words)
        ops.add(ops.embedding(positions, places), x)
        ops.add(ops.embedding(token_types, types), x)
        x = ops.layer_norm(x, *self.norm, 1e-12)
        for qkv, out, up, down in self.layers:
            heads = qkv(x).view(len(x), 3 * self.heads, -1)
            query, key, value = heads.split(self.heads, dim=1)
            scale = query.shape[-1] ** -0.5
            y = out(ops.encoder_attention(query, key, value, metadata, scale).flatten(1))
            ops.fused_add_layer_norm(y, x, *self.norm, 1e-12)
            x = down(ops.gelu(up(y)))
            ops.fused_add_layer_norm(x, y, *self.norm, 1e-12)
        return x


def make_step(lengths: list[int]) -> tuple:
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    metadata = make_metadata(
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        [torch.zeros(len(lengths), 0, dtype=torch.int32)],
        [torch.zeros(0, dtype=torch.int64)],
        0,
        lengths,
        lengths,
    )
    return (
        torch.randint(0, 30522, (sum(lengths),), dtype=torch.int32),
        torch.cat([torch.arange(length) for length in lengths]),
        metadata,
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(sum(lengths), dtype=torch.int32),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--bits", type=int, choices=(8, 4))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    library.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    ops = registry.select("cpu", dtype, head_dim=32)
    model = Encoder(ops, args.shape, dtype, args.bits)
    program = record_step(model, ops, Limits(32 * 256, 32, 32))
    assert program is not None, "native kernels are not built"
    print(f"{args.shape}, {library.isa}, {args.threads} threads, {args.dtype}, bits {args.bits}")
    for name, lengths in PROFILES.items():
        step = make_step(lengths)
        times: list[float] = []
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            program(*step)
            times.append(time.perf_counter() - start)
        least = min(times)
        flops = 2 * model.num_weights * sum(lengths)
        print(
            f"{name:9} ms: least {least * 1e3:8.3f}, median {statistics.median(times) * 1e3:8.3f}; "
            f"{len(lengths) / least:8.0f} texts/s; {flops / least / 1e9:6.0f} GFLOP/s of its layers"
        )
        print_shares(program, step, args.threads)


def print_shares(program, step: tuple, num_threads: int) -> None:
    """The least time of each kernel over 20 runs, added by name."""
    program.set_timer(CallTimer(num_threads))
    for _ in range(20):
        program(*step)
    runs = program.timer.take()
    program.set_timer(None)
    by_call: list[tuple[str, list[float]]] = []
    for run in runs:
        for i, call in enumerate(timed_calls(run)):
            if i == len(by_call):
                by_call.append((f"{call.op} {call.work.shape}", []))
            begins, ends = zip(*((begin, end) for _, begin, end in call.threads))
            by_call[i][1].append(max(ends) - min(begins))
    shares: dict[str, float] = {}
    for name, seconds in by_call:
        shares[name] = shares.get(name, 0.0) + min(seconds)
    total = sum(shares.values())
    for name, seconds in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"    {seconds * 1e6:9.1f} us {seconds / total:6.1%}  {name}")


if __name__ == "__main__":
    main()
