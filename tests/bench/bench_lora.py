"""Decode steps with LoRA adapters on all projections of a 0.5B, and what loading one takes.

    python tests/bench/bench_lora.py [--quantizations none int8] [--threads 1] [--rows 8]
    [--rank 16] [--rounds 40] [--write]

Steps of `rows` requests with a context of 128 tokens, in turns: an engine without LoRA, and one
with it whose rows have no adapter, all the same one, and each another. Milliseconds, "quiet" (the
tenth percentile, without disturbances by other processes) and "median", and the throughput as a
share of the engine without LoRA. Last, milliseconds of reading and checking an adapter's files, in
a thread beside steps, and of putting it in place between two. On a busy machine: `chrt -f 10`.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from quire import LoRARequest
from quire.executor.worker import Worker
from quire.frontend import bundled_model
from quire.tests.bench.bench_step import make_step, time_in_turn
from quire.tests.bench.gpu_shapes import SHAPES
from quire.tests.bench.report import write_result
from quire.tests.executor.driver import start_executor
from quire.tests.lora_adapters import random_pairs, write_peft

BUNDLED = Path(bundled_model.__file__).parent


def start(threads: int, **arguments: Any) -> Worker:
    return start_executor(
        BUNDLED,
        SHAPES["0.5B"],
        load_format="dummy",
        dtype="bfloat16",
        num_threads=threads,
        kv_cache_memory_bytes=2**27,
        **arguments,
    )


def write_adapter(executor: Worker, directory: Path, rank: int, seed: int) -> Path:
    shapes = {
        name: torch.empty(module.out_features, module.in_features, device="meta")
        for name, module in executor.loras._shapes.items()
        if name.endswith("_proj")
    }
    pairs = random_pairs(shapes, rank, seed, size=0.02)
    pairs = {name: (a.bfloat16(), b.bfloat16()) for name, (a, b) in pairs.items()}
    return write_peft(directory, pairs, rank)


def measure(quantization: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    base = start(arguments.threads, quantization=quantization)
    lora = start(
        arguments.threads,
        quantization=quantization,
        enable_lora=True,
        max_loras=arguments.rows,
        max_lora_rank=arguments.rank,
    )
    loras, loads = lora.loras, []
    with tempfile.TemporaryDirectory() as directory:
        paths = {
            number: write_adapter(lora, Path(directory) / str(number), arguments.rank, number)
            for number in range(1, arguments.rows + 1)
        }
        for number, path in paths.items():
            request = LoRARequest(str(number), number, str(path))
            begin = perf_counter()
            lora.read_lora(request).result()
            read = perf_counter()
            lora.add_lora(request)
            loras.enter(number, number)
            loads.append((read - begin, perf_counter() - read))
    inputs = make_step(arguments.rows)

    def step(executor: Worker, adapters: list[int] | None) -> Any:
        token_ids, positions, metadata, indices = inputs
        if adapters is not None:
            metadata = replace(metadata, adapters=torch.tensor(adapters, dtype=torch.int32))
        program = executor.runner.program
        assert program is not None
        return lambda: program(token_ids, positions, metadata, indices)

    rows = arguments.rows
    steps = {
        "without LoRA": step(base, None),
        "no adapter": step(lora, [-1] * rows),
        "one adapter": step(lora, [0] * rows),
        "each another": step(lora, list(range(rows))),
    }
    times = time_in_turn(steps, arguments.rounds)
    for name, seconds in times.items():
        share = times["without LoRA"]["quiet"] / seconds["quiet"]
        print(
            f"{quantization or 'bf16':6} {name:14} quiet {1000 * seconds['quiet']:7.2f} ms  "
            f"median {1000 * seconds['median']:7.2f} ms  {share:.3f} of the throughput"
        )
    read, put = (sorted(1000 * load[i] for load in loads)[len(loads) // 2] for i in (0, 1))
    print(f"{quantization or 'bf16':6} an adapter: read in {read:.1f} ms, put in {put:.1f} ms")
    for executor in (base, lora):
        executor.shutdown()
    return {"steps": times, "read_ms": read, "put_ms": put}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quantizations", nargs="+", default=["none", "int8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    results = {
        name: measure(None if name == "none" else name, arguments)
        for name in arguments.quantizations
    }
    if arguments.write:
        write_result("0.5B", "lora", {"arguments": vars(arguments)} | results)


if __name__ == "__main__":
    main()
