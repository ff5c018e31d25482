"""Native linear layers on GGUF's blocks beside int8, int4 and bf16, in alternating calls over
weights that exceed the caches.

    python tests/bench/bench_gguf_linear.py [--threads 1] [--seconds 1.0] [--shape 9728x1024]
    [--rows 1,4,16,256]

Prints microseconds per call, bytes of the weight per second, and the time relative to int4's. One
thread is timed by its own CPU clock, as in bench_linear.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from quire.kernels.cpu.native.gguf import PackedGgufLinear
from quire.kernels.cpu.native.library import library
from quire.kernels.cpu.native.linear import PackedLinear
from quire.kernels.cpu.native.quantized import PackedQuantizedLinear
from quire.kernels.reference.gguf_linear import TYPES
from quire.tests.bench.bench_linear import COLD_BYTES, measure
from quire.tests.kernels.cases import random_blocks
from torch import Tensor


def packed(out_features: int, in_features: int) -> dict[str, tuple[float, list[Callable]]]:
    """Kind of weight -> bits per weight, and its layers, one per copy of the weight."""
    weight = torch.randn(out_features, in_features).mul_(0.02).bfloat16()
    dense: dict[str, tuple[float, Callable[[Tensor], Callable]]] = {
        "bf16": (16, lambda w: PackedLinear([w], None)),
        "int8": (8.125, lambda w: PackedQuantizedLinear([w], None, bits=8)),
        "int4": (4.5, lambda w: PackedQuantizedLinear([w], None, bits=4)),
    }

    def copies(bits: float) -> range:
        return range(max(2, min(48, int(COLD_BYTES // (weight.numel() * bits / 8)))))

    layers = {
        name: (bits, [pack(weight) for _ in copies(bits)]) for name, (bits, pack) in dense.items()
    }
    for type in TYPES:
        blocks = random_blocks(out_features, in_features, type)
        bits = 8 * blocks.numel() / weight.numel()
        made = [PackedGgufLinear([blocks], [type], None, torch.bfloat16) for _ in copies(bits)]
        layers[type] = (bits, made)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per number of rows")
    parser.add_argument("--shape", default="9728x1024", help="out x in, a multiple of 256")
    parser.add_argument("--rows", default="1,4,16,256")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    library.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    out_features, in_features = map(int, arguments.shape.split("x"))
    print(f"{library.isa}, {arguments.threads} threads, {out_features} x {in_features}")
    with torch.inference_mode():
        layers = packed(out_features, in_features)
        for num_rows in map(int, arguments.rows.split(",")):
            x = torch.randn(num_rows, in_features).bfloat16()
            calls = {name: made for name, (_, made) in layers.items()}
            times = measure(calls, x, arguments.seconds, clock)
            medians = {name: statistics.median(found) for name, found in times.items()}
            for name, seconds in medians.items():
                rate = out_features * in_features * layers[name][0] / 8 / seconds / 1e9
                print(
                    f"M={num_rows:<4} {name:5} {seconds * 1e6:10.1f} us {rate:6.1f} GB/s "
                    f"{seconds / medians['int4']:5.2f} of int4",
                    flush=True,
                )


if __name__ == "__main__":
    main()
