"""What a trace costs while it records: a step with a trace and one without, in turn.

    chrt -f 10 python tests/bench/bench_trace.py [--rounds 40] [--steps 64] [--rows 1]
    [--scheduler-steps 1] [--num-threads 2] [--model DIRECTORY]

Two engines in one process decode the same requests, one step each in turn. In each round another
one is traced. A step's time is that of LLMEngine.step; starting and ending a trace is not part of
it, because the engine records the model's program again then and puts the figures into words. The
cost is the median over all pairs of steps: both meet the same neighbours on the machine.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter
from typing import Any

from quire import EngineArgs, LLMEngine, SamplingParams

WARM_UP = 2  # steps of a round, after the trace's beginning


def make_engine(rows: int, **settings: Any) -> LLMEngine:
    engine = LLMEngine.from_engine_args(EngineArgs(**settings), engine="inproc")
    for row in range(rows):
        params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
        engine.add_request(f"r{row}", {"prompt_token_ids": [5, 9, 12, row % 100]}, params)
    return engine


def seconds_of_step(engine: LLMEngine) -> float:
    begin = perf_counter()
    engine.step()
    return perf_counter() - begin


def measure(engines: list[LLMEngine], rounds: int, num_steps: int) -> list[tuple[float, float]]:
    """(seconds without a trace, seconds with one) of each pair of steps."""
    pairs = []
    for number in range(rounds):
        plain, traced = engines[:: 1 if number % 2 else -1]
        traced.call_utility("start_trace", num_steps)
        for step in range(num_steps):
            if step % 2:
                pair = seconds_of_step(plain), seconds_of_step(traced)
            else:
                pair = (seconds_of_step(traced), seconds_of_step(plain))[::-1]
            if number > 1 and step >= WARM_UP:
                pairs.append(pair)
        traced.call_utility("end_trace")
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--scheduler-steps", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=0)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    settings: dict[str, Any] = {"num_scheduler_steps": args.scheduler_steps}
    settings |= {"model": args.model} if args.model else {}
    settings |= {"num_threads": args.num_threads} if args.num_threads else {}
    engines = [make_engine(args.rows, **settings) for _ in range(2)]
    pairs = measure(engines, args.rounds, args.steps)
    plain = 1e6 * statistics.median(one for one, _ in pairs)
    added = sorted(1e6 * (traced - one) for one, traced in pairs)
    low, high = added[len(added) * 2 // 5], added[len(added) * 3 // 5]
    cost = statistics.median(added)
    print(
        f"{len(pairs)} pairs: {plain:.0f} us without a trace; one adds {cost:.1f} us "
        f"(two fifths {low:.1f}, three fifths {high:.1f}), {100 * cost / plain:.1f} %"
    )


if __name__ == "__main__":
    main()
