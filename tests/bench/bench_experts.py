"""Native experts beside a dense gated MLP with the inner size of a token's experts together, which
takes as many products per token, and beside a plain reading of as many bytes of weights.

    python tests/bench/bench_experts.py [--threads 1] [--seconds 1.0] [--rows 1,8,64,512,2048]
    [--kinds bf16,int8,int4,Q4_K] [--isa avx2] [--experts 128] [--top-k 8] [--hidden 2048]
    [--inner 768]

The defaults are the sizes of Qwen3-30B-A3B. Calls alternate, over layers that exceed the caches.
Prints medians: microseconds per call; bytes per second of the experts that have rows, also as a
share of the reading's; operations per second, also as a share of the dense MLP's. One thread is
timed by its CPU time, several by the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import quire.executor  # noqa: F401  threads of torch that wait leave the core
import torch
from quire.kernels.cpu.native.experts import fused_moe
from quire.kernels.cpu.native.gguf import PackedGgufLinear
from quire.kernels.cpu.native.library import library
from quire.kernels.cpu.native.linear import PackedLinear
from quire.kernels.cpu.native.quantized import PackedQuantizedLinear
from quire.kernels.moe import Experts
from quire.kernels.reference.gguf_linear import TYPES
from quire.tests.kernels.cases import random_blocks
from quire.tests.kernels.moe_cases import random_ids
from torch import Tensor

BITS = {"bf16": 16, "int8": 8.125, "int4": 4.5}
DENSE_COPIES = 4
READ_BYTES = 2**30


def packer(kind: str, out_features: int, in_features: int) -> Callable[[], PackedLinear]:
    """A function that packs random weights; always the same ones, which takes less time."""
    if kind in TYPES:
        blocks = random_blocks(out_features, in_features, kind)
        return lambda: PackedGgufLinear([blocks], [kind], None, torch.bfloat16)
    weight = torch.randn(out_features, in_features).mul_(0.02).bfloat16()
    if kind == "bf16":
        return lambda: PackedLinear([weight], None)
    return lambda: PackedQuantizedLinear([weight], None, bits=int(kind.removeprefix("int")))


class Bench:
    """Layers of one kind of weights, and memory to read."""

    def __init__(self, kind: str, a: argparse.Namespace):
        gate_up, down = packer(kind, 2 * a.inner, a.hidden), packer(kind, a.hidden, a.inner)
        self.experts = Experts(
            [gate_up() for _ in range(a.experts)], [down() for _ in range(a.experts)], "silu"
        )
        wide = a.top_k * a.inner
        self.dense = [
            (packer(kind, 2 * wide, a.hidden)(), packer(kind, a.hidden, wide)())
            for _ in range(DENSE_COPIES)
        ]
        bits = BITS.get(kind) or 8 * random_blocks(1, 256, kind).numel() / 256
        self.expert_bytes = int(3 * a.hidden * a.inner * bits / 8)
        self.memory = torch.ones(READ_BYTES // 4)

    def run_experts(self, turn: int, x: Tensor, weights: Tensor, ids: list[Tensor]) -> None:
        fused_moe(x, ids[turn % len(ids)], weights, self.experts)

    def run_dense(self, turn: int, x: Tensor, *_: object) -> None:
        first, second = self.dense[turn % DENSE_COPIES]
        second(first.silu_and_mul(x))

    def run_reading(self, turn: int, x: Tensor, weights: Tensor, ids: list[Tensor]) -> None:
        size = len(ids[turn % len(ids)].unique()) * self.expert_bytes // 4
        begin = turn * size % (len(self.memory) - size)
        self.memory[begin : begin + size].sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per kind and number of rows")
    parser.add_argument("--rows", default="1,8,64,512,2048")
    parser.add_argument("--kinds", default="bf16,int8,int4,Q4_K")
    parser.add_argument("--isa", choices=library.isas, default=library.isa)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    library.use_isa(a.isa)
    library.set_num_threads(a.threads)
    clock = time.thread_time if a.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    print(f"{library.isa}, {a.threads} threads, {a.top_k} of {a.experts} experts of {a.inner}")
    print("weights  rows        experts us  GB/s of reading    GFLOP/s of dense")
    for kind in a.kinds.split(","):
        bench = Bench(kind, a)
        for rows in map(int, a.rows.split(",")):
            x, weights = torch.randn(rows, a.hidden).bfloat16(), torch.rand(rows, a.top_k)
            ids = [random_ids(rows, a.experts, a.top_k) for _ in range(16)]
            runs = [bench.run_experts, bench.run_dense, bench.run_reading]
            times: list[list[float]] = [[] for _ in runs]
            turn, end = 0, time.perf_counter() + a.seconds
            while time.perf_counter() < end or turn < 3:
                for run, found in zip(runs, times, strict=True):
                    begin = clock()
                    run(turn, x, weights, ids)
                    found.append(clock() - begin)
                turn += 1
            experts, dense, reading = map(statistics.median, times)
            active = statistics.mean(len(chosen.unique()) for chosen in ids)
            num_bytes = active * bench.expert_bytes
            operations = 2 * rows * a.top_k * 3 * a.hidden * a.inner
            print(
                f"{kind:7} {rows:5} {experts * 1e6:15.0f} {num_bytes / experts / 1e9:6.1f} "
                f"{reading / experts:9.2f} {operations / experts / 1e9:10.0f} "
                f"{dense / experts:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
