"""One decode step of a model: torch's kernels, native kernels, and native ones recorded as one
call.

    python tests/bench/bench_step.py [--models bundled 16M] [--dtypes float32 bfloat16]
    [--batches 1 32] [--threads 1] [--rounds 60] [--write]

The three forms alternate. Milliseconds, "quiet" (the tenth percentile, without disturbances by
other processes) and "median", of steps whose requests have a context of 128 tokens each. Last, in
microseconds, the cost of a recorded step in Python and ctypes: the same program without its calls.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from quire.executor.program.step_program import OPERATIONS, OpByOp
from quire.executor.worker import Worker
from quire.frontend import bundled_model
from quire.kernels import registry
from quire.kernels.cpu.native.library import library
from quire.kernels.ops import AttentionMetadata
from quire.tests.bench.report import hardware, write_result
from quire.tests.executor.driver import start_executor

BUNDLED = Path(bundled_model.__file__).parent
SHAPE_16M = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
}
MODELS: dict[str, dict[str, Any]] = {
    "bundled": {},
    "16M": {"hf_overrides": SHAPE_16M, "load_format": "dummy"},
}
CONTEXT, BLOCK_SIZE = 128, 16


def make_step(num_requests: int) -> tuple[Any, ...]:
    num_blocks = CONTEXT // BLOCK_SIZE
    blocks = torch.arange(1, num_requests * num_blocks + 1, dtype=torch.int32).view(
        num_requests, num_blocks
    )
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32),
        seq_lens=torch.full((num_requests,), CONTEXT, dtype=torch.int32),
        block_tables=blocks,
        slot_mapping=blocks[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1,
        num_decodes=num_requests,
        query_lens=[1] * num_requests,
        seq_lens_list=[CONTEXT] * num_requests,
    )
    return (
        torch.arange(num_requests, dtype=torch.int32),
        torch.full((num_requests,), CONTEXT - 1),
        metadata,
        torch.arange(num_requests),
    )


def time_in_turn(
    functions: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, dict[str, float]]:
    """Seconds of each function, one call of each per round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = perf_counter()
            function()
            times[name].append(perf_counter() - start)
    return {
        name: {"quiet": sorted(found)[rounds // 10], "median": statistics.median(found)}
        for name, found in times.items()
    }


def build_forms(
    torchs: Worker, native: Worker, step: tuple[Any, ...]
) -> dict[str, Callable[[], Any]]:
    def op_by_op(executor: Worker) -> Callable[[], Any]:
        run = OpByOp(executor.model, executor.ops)
        return lambda: run(
            *step[:2],
            dataclasses.replace(step[2], scratch={}),
            step[3],
        )

    program = native.runner.program
    return {
        "torch": op_by_op(torchs),
        "native": op_by_op(native),
        "recorded": lambda: program(*step),
    }


def time_without_calls(executor: Worker, rounds: int) -> dict[str, float]:
    program, step = executor.runner.program, make_step(1)
    pointers, program._pointers = program._pointers, (ctypes.c_void_p * 0)()
    try:
        return time_in_turn({"empty": lambda: program(*step)}, rounds)["empty"]
    finally:
        program._pointers = pointers


def torch_kernels() -> dict[str, str]:
    names = {op: {found.name for found in registry.implementations(op)} for op in OPERATIONS}
    return {op: "cpu" if "cpu" in found else "reference" for op, found in names.items()}


@torch.inference_mode()
def measure(model: str, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    settings = {
        **MODELS[model],
        "dtype": dtype,
        "num_threads": args.threads,
        "max_num_seqs": max(args.batches),
        "kv_cache_memory_bytes": 2**28,
    }
    torchs, native = (
        start_executor(BUNDLED, kernels=torch_kernels(), **settings),
        start_executor(BUNDLED, **settings),
    )
    if native.runner.program is None:
        raise SystemExit("the model cannot be recorded here: are the native kernels built?")
    results = []
    for num_requests in args.batches:
        found = time_in_turn(build_forms(torchs, native, make_step(num_requests)), args.rounds)
        results.append(
            {
                "model": model,
                "dtype": dtype,
                "requests": num_requests,
                "threads": args.threads,
                "isa": library.isa,
                "seconds": found,
            }
        )
        columns = "  ".join(
            f"{name} {times['quiet'] * 1e3:7.2f} {times['median'] * 1e3:7.2f}"
            for name, times in found.items()
        )
        print(
            f"{model:8} {dtype:9} {num_requests:3} requests, ms (quiet, median): {columns}",
            flush=True,
        )
    empty = time_without_calls(native, 20 * args.rounds)
    print(
        f"{model:8} {dtype:9} without its {len(native.runner.program.calls)} calls: "
        f"{empty['quiet'] * 1e6:.1f} us, {empty['median'] * 1e6:.1f}"
    )
    return [*results, {"model": model, "dtype": dtype, "without_calls_s": empty}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--write", action="store_true", help="append the numbers to tests/bench/results/"
    )
    args = parser.parse_args()
    print(f"{hardware()}, {args.threads} threads")
    results = [
        row for model in args.models for dtype in args.dtypes for row in measure(model, dtype, args)
    ]
    if args.write:
        print(write_result("bundled", "step", {"steps": results}))


if __name__ == "__main__":
    main()
