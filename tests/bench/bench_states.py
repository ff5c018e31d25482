"""Native kernels of layers that keep a state, beside the machine's limits.

    python tests/bench/bench_states.py [--threads 1] [--rounds 10] [--write]

Decodes of 1 and of 16 requests: gigabytes of state, read and written, per second, beside those of a
copy of as much memory. A prompt of 2,048 tokens: billions of operations on numbers per second (7
per number of a state for the delta rule, 5 for the scan), beside those of a product of matrices in
fp32. Sizes are those of Qwen 3.5 (0.8B: 16 heads, 4B: 32) and of Granite 4 Tiny; every layer has
states of its own. Seconds are the least of all rounds, by the clock of the calling thread if there
is one, so that other programs count less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from quire.kernels import registry
from quire.kernels.cpu.native.library import library
from quire.tests.bench.report import write_result
from quire.tests.kernels.state_rows_cases import (
    Operands,
    Row,
    conv_operands,
    delta_operands,
    scan_operands,
    states_metadata,
)

LAYERS, PROMPT = 18, 2048
DTYPE = torch.bfloat16


class Kernel(NamedTuple):
    op: str
    name: str
    operands: Callable[[int], Operands]
    flops: int  # per number of the state and token


KERNELS = [
    Kernel("gated_delta_rule", "0.8B", lambda n: delta_operands(n, DTYPE, 16, 16, 128, 128), 7),
    Kernel("gated_delta_rule", "4B", lambda n: delta_operands(n, DTYPE, 16, 32, 128, 128), 7),
    Kernel(
        "gated_delta_rule",
        "Kimi Linear",
        lambda n: delta_operands(n, DTYPE, 32, 32, 128, 128, decays_rows=True),
        7,
    ),
    Kernel("selective_scan", "Granite", lambda n: scan_operands(n, DTYPE, 48, 64, 1, 128), 5),
    Kernel("short_conv", "0.8B", lambda n: conv_operands(n, DTYPE, 6144), 0),
]


def least_seconds(call: Callable[[], Any], rounds: int, threads: int) -> float:
    clock = time.thread_time if threads == 1 else time.perf_counter
    found = []
    for _ in range(rounds):
        begin = clock()
        call()
        found.append(clock() - begin)
    return min(found)


def calls_of(kernel: Kernel, requests: int, tokens: int, layers: int) -> tuple[Callable, int]:
    """Runs the kernel in each of the layers; and the numbers of all their states."""
    function = next(i for i in registry.implementations(kernel.op) if i.name == "native").function
    operands = kernel.operands(requests * tokens)
    shape = operands.state.shape[1:]
    states = torch.zeros(layers, requests, *shape, dtype=operands.state.dtype)
    first = 9 if tokens == 1 else 0
    metadata = states_metadata([Row(tokens, first, place) for place in range(requests)])
    all_args = [operands._replace(state=state).args(metadata) for state in states]

    def call() -> None:
        for args in all_args:
            function(*args)

    return call, states.numel()


def measure_decode(kernel: Kernel, requests: int, rounds: int, threads: int) -> dict[str, Any]:
    call, numbers = calls_of(kernel, requests, 1, LAYERS)
    seconds = least_seconds(call, rounds, threads)
    num_bytes = 2 * 4 * numbers
    source = torch.ones(numbers)
    target = torch.empty_like(source)
    copied = least_seconds(lambda: target.copy_(source), rounds, threads)
    result = {"microseconds_per_layer": 1e6 * seconds / LAYERS}
    if kernel.flops:
        result |= {"gb_per_s": num_bytes / seconds / 1e9, "copy_gb_per_s": num_bytes / copied / 1e9}
        result["share"] = copied / seconds
    return result


def measure_prompt(kernel: Kernel, rounds: int, threads: int) -> dict[str, Any]:
    call, numbers = calls_of(kernel, 1, PROMPT, 1)
    seconds = least_seconds(call, rounds, threads)
    matrix = torch.randn(1024, 1024)
    product = least_seconds(lambda: matrix @ matrix, rounds, threads)
    result = {"milliseconds": 1e3 * seconds}
    if kernel.flops:
        result["gflops"] = PROMPT * numbers * kernel.flops / seconds / 1e9
        result["product_gflops"] = 2 * 1024**3 / product / 1e9
        result["share"] = result["gflops"] / result["product_gflops"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rounds, threads = arguments.rounds, arguments.threads
    library.set_num_threads(threads)
    torch.set_num_threads(threads)
    results: dict[str, Any] = {}
    for kernel in KERNELS:
        found = {
            f"decode of {requests}": measure_decode(kernel, requests, rounds, threads)
            for requests in (1, 16)
        }
        found[f"prompt of {PROMPT}"] = measure_prompt(kernel, max(3, rounds // 3), threads)
        results[f"{kernel.op}, {kernel.name}"] = found
        for case, numbers in found.items():
            text = "  ".join(f"{name} {value:.2f}" for name, value in numbers.items())
            print(f"{kernel.op:17} {kernel.name:8} {case:15} {text}", flush=True)
    if arguments.write:
        write_result("states", "kernels", {"arguments": vars(arguments)} | results)


if __name__ == "__main__":
    main()
