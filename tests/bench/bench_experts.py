"""Native experts beside a dense gated MLP with the inner size of a token's experts together: one
token reads as many bytes of weights in both, and each token takes as many products.

    python tests/bench/bench_experts.py [--threads 1] [--seconds 1.0] [--rows 1,8,256]
    [--kinds bf16,int8,int4,Q4_K] [--experts 128] [--top-k 8] [--hidden 2048] [--inner 768]

The defaults are the sizes of Qwen3-30B-A3B. Calls alternate, over layers that exceed the caches.
Prints microseconds per call, the bytes per second of the experts that have rows, and the time
relative to the dense MLP's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

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


def packer(kind: str, out_features: int, in_features: int) -> Callable[[], PackedLinear]:
    """A function that packs random weights; always the same ones, which takes less time."""
    if kind in TYPES:
        blocks = random_blocks(out_features, in_features, kind)
        return lambda: PackedGgufLinear([blocks], [kind], None, torch.bfloat16)
    weight = torch.randn(out_features, in_features).mul_(0.02).bfloat16()
    if kind == "bf16":
        return lambda: PackedLinear([weight], None)
    return lambda: PackedQuantizedLinear([weight], None, bits=int(kind.removeprefix("int")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per kind and number of rows")
    parser.add_argument("--rows", default="1,8,256")
    parser.add_argument("--kinds", default="bf16,int8,int4,Q4_K")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    library.set_num_threads(a.threads)
    clock = time.thread_time if a.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    print(f"{library.isa}, {a.threads} threads, {a.top_k} of {a.experts} experts of {a.inner}")
    for kind in a.kinds.split(","):
        gate_up, down = packer(kind, 2 * a.inner, a.hidden), packer(kind, a.hidden, a.inner)
        experts = Experts(
            [gate_up() for _ in range(a.experts)], [down() for _ in range(a.experts)], "silu"
        )
        wide = a.top_k * a.inner
        dense = [
            (packer(kind, 2 * wide, a.hidden)(), packer(kind, a.hidden, wide)())
            for _ in range(DENSE_COPIES)
        ]
        bits = BITS.get(kind) or 8 * random_blocks(1, 256, kind).numel() / 256
        for rows in map(int, a.rows.split(",")):
            x, weights = torch.randn(rows, a.hidden).bfloat16(), torch.rand(rows, a.top_k)
            ids = [random_ids(rows, a.experts, a.top_k) for _ in range(16)]
            times: dict[str, list[float]] = {"experts": [], "dense": []}

            def run(
                name: str,
                turn: int,
                x: Tensor = x,
                weights: Tensor = weights,
                ids: list[Tensor] = ids,
                experts: Experts = experts,
                dense: list = dense,
            ) -> None:
                if name == "experts":
                    fused_moe(x, ids[turn % len(ids)], weights, experts)
                else:
                    first, second = dense[turn % len(dense)]
                    second(first.silu_and_mul(x))

            turn, end = 0, time.perf_counter() + a.seconds
            while time.perf_counter() < end or turn < 3:
                for name, found in times.items():
                    begin = clock()
                    run(name, turn)
                    found.append(clock() - begin)
                turn += 1
            medians = {name: statistics.median(found) for name, found in times.items()}
            active = statistics.mean(len(chosen.unique()) for chosen in ids)
            for name, num_experts in (("experts", active), ("dense", a.top_k)):
                num_bytes = num_experts * 3 * a.hidden * a.inner * bits / 8
                print(
                    f"{kind:5} M={rows:<5} {name:8} {medians[name] * 1e6:10.0f} us "
                    f"{num_bytes / medians[name] / 1e9:6.1f} GB/s "
                    f"{medians[name] / medians['dense']:5.2f} of dense",
                    flush=True,
                )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
