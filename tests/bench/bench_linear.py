"""Linear layers, native and torch's, in alternating calls over weights that exceed the caches.

    python tests/bench/bench_linear.py [--threads 2] [--seconds 1.0] [--dtype bfloat16]
    [--model 0.5B] [--rows 1,16,256]

Prints microseconds, bytes and operations per second. One thread is timed by its own CPU clock,
which does not count time in which others have the core. Use that for comparisons on a shared
machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from quire.kernels import registry
from quire.kernels.cpu.native.library import library
from torch import Tensor

SHAPES = {  # out, in
    "0.5B": {
        "qkv": (1152, 896),
        "o": (896, 896),
        "gate_up": (9728, 896),
        "down": (896, 4864),
        "head": (151936, 896),
    },
    "16M": {
        "qkv": (640, 384),
        "o": (384, 384),
        "gate_up": (2048, 384),
        "down": (384, 1024),
        "head": (8192, 384),
    },
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
# calls alternate between copies of a weight, so that each is read from memory
COLD_BYTES = 2**27
NAMES = ("native", "cpu")


def packed(
    out_features: int, in_features: int, dtype: torch.dtype
) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """Implementation -> its layers, one per copy of the weight."""
    copies = max(2, min(48, COLD_BYTES // (out_features * in_features * dtype.itemsize)))
    functions = {
        i.name: i.function for i in registry.implementations("pack_linear") if i.name in NAMES
    }
    return {
        n: [
            f(torch.randn(out_features, in_features).mul_(0.02).to(dtype), None)
            for _ in range(copies)
        ]
        for n, f in functions.items()
    }


def measure(
    layers: dict[str, list[Callable[[Tensor], Tensor]]],
    x: Tensor,
    seconds: float,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in layers}
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or count < 4:
        for name, copies in layers.items():
            start = clock()
            copies[count % len(copies)](x)
            times[name].append(clock() - start)
        count += 1
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    parser.add_argument("--model", choices=SHAPES)
    parser.add_argument("--only", choices=SHAPES["0.5B"])
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library.set_num_threads(args.threads)
    dtype, clock = (
        getattr(torch, args.dtype),
        time.thread_time if args.threads == 1 else time.perf_counter,
    )
    print(
        f"{library.isa}, {args.threads} threads, {args.dtype}; us per call: tenth percentile, "
        f"median"
    )
    cases = [
        (model, name, shape) for model, shapes in SHAPES.items() for name, shape in shapes.items()
    ]
    for model, name, (out_features, in_features) in cases:
        if args.model not in (None, model) or args.only not in (None, name):
            continue
        with torch.inference_mode():
            layers = packed(out_features, in_features, dtype)
            for num_rows in map(int, args.rows.split(",")):
                times = measure(
                    layers, torch.randn(num_rows, in_features).to(dtype), args.seconds, clock
                )
                (native, median), (own, own_median) = (
                    (statistics.quantiles(t, n=10)[0], statistics.median(t))
                    for t in (times[n] for n in NAMES)
                )
                size = out_features * in_features
                rates = (
                    f"{size * dtype.itemsize / native / 1e9:6.1f} GB/s "
                    f"{2 * num_rows * size / native / 1e9:7.1f} GFLOP/s"
                )
                us = (
                    f"native {native * 1e6:9.1f} {median * 1e6:9.1f}  "
                    f"torch {own * 1e6:9.1f} {own_median * 1e6:9.1f}"
                )
                print(
                    f"{model:5} {name:8} M={num_rows:<5}{us}  torch / native {own / native:5.2f} "
                    f"{own_median / median:5.2f} {rates}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
