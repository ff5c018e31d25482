"""What a decoded token of a real model costs outside its recorded program.

    python tests/bench/bench_outside.py [--model DIR] [--batches 1 32] [--rounds 8]
    [--async-scheduling]

In one process, with a child process, and the program alone. Microseconds for a token of each
request, medians of means over 24 of them. All forms alternate: engines with default settings,
engines with steps of one token, and the program alone, which repeats the inputs of the last such
step. The model of bench_overhead.py computes nothing; a real model evicts Python's data from the
caches.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

from quire import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.clients.mp_client import MPClient
from quire.tests.bench.report import hardware
from quire.tests.executor.on_device import use_forward
from quire.tests.fake_engine import open_blocking

# tokens per mean; steps left out at both ends of a round; tokens of each request
MEAN, EDGE, NUM_TOKENS = 24, 12, 200


class Witness:
    """A program that records the inputs of its last call."""

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


def means(steps: list[tuple[float, int]]) -> list[float]:
    """steps: (seconds, tokens) -> seconds per token, each the mean of at least MEAN tokens."""
    found, seconds, tokens = [], 0.0, 0
    for step_s, num_tokens in steps:
        seconds, tokens = seconds + step_s, tokens + num_tokens
        if tokens >= MEAN:
            found.append(seconds / tokens)
            seconds, tokens = 0.0, 0
    return found


def timed(function: Callable[[], Any]) -> float:
    begin = perf_counter()
    function()
    return perf_counter() - begin


def round_of(engine: LLMEngine, batch: int, prefix: str) -> list[float]:
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    for i in range(batch):
        engine.add_request(
            f"{prefix}-{i}",
            {"prompt_token_ids": [2 + (i * 7 + j) % 500 for j in range(64)]},
            params,
        )
    steps = []
    while engine.has_unfinished_requests():
        begin = perf_counter()
        outputs = engine.step()
        steps.append(
            (
                perf_counter() - begin,
                max((len(output.outputs[0].token_ids) for output in outputs), default=0),
            )
        )
    edge = min(EDGE, len(steps) // 6)
    return means(steps[edge:-edge])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--async-scheduling", action="store_true")
    args = parser.parse_args()

    def make(client: type, **arguments: Any) -> LLMEngine:
        config = EngineArgs(
            model=args.model,
            dtype=args.dtype,
            num_threads=args.num_threads,
            max_model_len=1024,
            max_num_seqs=max(args.batches),
            swap_space=0.0,
            enable_prefix_caching=False,
            disable_log_stats=True,
            async_scheduling=args.async_scheduling,
            **arguments,
        ).create_engine_config()
        return LLMEngine(config, client(config))

    clients = {
        "inproc": InprocClient,
        "process": lambda config: open_blocking(MPClient.start(config)),
    }
    engines = {name: make(client) for name, client in clients.items()}
    engines |= {
        f"{name}, steps of one": make(client, num_scheduler_steps=1)
        for name, client in clients.items()
    }
    worker = engines["inproc, steps of one"].client._engine.core.executor
    witness = Witness(worker.runner.program)
    use_forward(worker, witness)
    print(f"{hardware()}; microseconds per token")
    try:
        for batch in args.batches:
            times: dict[str, list[float]] = {"program": []} | {name: [] for name in engines}
            for round_ in range(args.rounds + 1):  # the first warms up
                found = {
                    name: round_of(engine, batch, f"{batch}-{round_}")
                    for name, engine in engines.items()
                }
                found["program"] = means([(timed(witness.again), 1) for _ in range(6 * MEAN)])
                for name in times:
                    times[name] += found[name] if round_ else []
            program = 1e6 * statistics.median(times.pop("program"))
            rest = "; ".join(
                f"{name} {1e6 * statistics.median(t):.0f} "
                f"({1e6 * statistics.median(t) - program:+.0f})"
                for name, t in times.items()
            )
            print(f"batch {batch}: program alone {program:.0f}, {rest}", flush=True)
    finally:
        for engine in engines.values():
            engine.shutdown()


if __name__ == "__main__":
    main()
