"""What a decode step of a real model costs outside its recorded program: a step in one process, a step with a child, and the program alone.
May know: LLMEngine, its clients, where the runner keeps its program.
Must not know: schedulers, kernels.

    python tests/bench/bench_outside.py [--model DIR] [--batches 1 32] [--rounds 8] [--async-scheduling]

Microseconds, medians of means over 25 steps; the three take turns, and the program alone repeats the inputs of the last step. Beside
bench_overhead.py, whose model computes nothing: a model that computes pushes what Python needs out of the caches."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

from quire import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from quire.frontend.inproc_client import InprocClient
from quire.frontend.mp_client import MPClient
from quire.tests.bench.report import hardware

BURST, EDGE, NUM_TOKENS = 25, 12, 200  # steps of a mean, and those left out at both ends of a round; tokens of each request


class Witness:
    """A program that remembers what it was last called with."""

    def __init__(self, program: Any):
        self._program = program
        self.inputs: tuple[Any, ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        self.inputs = inputs
        return self._program(*inputs)

    def again(self) -> None:
        self._program(*self.inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def bursts(times: list[float]) -> list[float]:
    return [statistics.mean(times[i : i + BURST]) for i in range(0, len(times) - BURST + 1, BURST)]


def timed(function: Callable[[], Any]) -> float:
    begin = perf_counter()
    function()
    return perf_counter() - begin


def round_of(engine: LLMEngine, batch: int, prefix: str) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    for i in range(batch):
        engine.add_request(f"{prefix}-{i}", {"prompt_token_ids": [2 + (i * 7 + j) % 500 for j in range(64)]}, params)
    times = []
    while engine.has_unfinished_requests():
        times.append(timed(engine.step))
    return bursts(times[EDGE:-EDGE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--async-scheduling", action="store_true")
    args = parser.parse_args()
    config = EngineArgs(
        model=args.model, dtype=args.dtype, num_threads=args.num_threads, max_model_len=1024, max_num_seqs=max(args.batches), swap_space=0.0,
        enable_prefix_caching=False, disable_log_stats=True, async_scheduling=args.async_scheduling,
    ).create_engine_config()  # fmt: skip
    engines = {"inproc": LLMEngine(config, InprocClient(config)), "process": LLMEngine(config, MPClient(config))}
    runner = engines["inproc"].client._engine.core.executor.worker.runner
    runner.program = witness = Witness(runner.program)
    print(f"{hardware()}; microseconds per step")
    try:
        for batch in args.batches:
            times: dict[str, list[float]] = {"program": []} | {name: [] for name in engines}
            for round_ in range(args.rounds + 1):  # the first warms up
                found = {name: round_of(engine, batch, f"{batch}-{round_}") for name, engine in engines.items()}
                found["program"] = bursts([timed(witness.again) for _ in range(6 * BURST)])
                for name in times:
                    times[name] += found[name] if round_ else []
            program = 1e6 * statistics.median(times.pop("program"))
            rest = ", ".join(f"{name} {1e6 * statistics.median(t):.0f} ({1e6 * statistics.median(t) - program:+.0f})" for name, t in times.items())
            print(f"batch {batch}: program alone {program:.0f}, {rest}", flush=True)
    finally:
        for engine in engines.values():
            engine.shutdown()


if __name__ == "__main__":
    main()
