"""Times what it costs to bring a preempted request back, as the engine starts.

Must not know: torch, what runs the passes, when a request is preempted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from ..ipc.config import SchedulerConfig, resolved

# tokens of the passes that measure recomputation; only fast models run the larger one
MEASURED_TOKENS = (8, 32)
MEASURING_BUDGET_S = 0.02  # of start-up; a slower pass is run once


def measure_recompute(run_pass: Callable[[int], None], scheduler_config: SchedulerConfig) -> float:
    """Seconds that the model takes for a token of a prompt. run_pass: of a number of tokens; it
    waits for the result.
    """
    most_tokens = min(
        resolved(scheduler_config.max_num_batched_tokens), scheduler_config.max_num_seqs
    )
    seconds = 0.0
    for num_tokens in sorted({min(count, most_tokens) for count in MEASURED_TOKENS}):

        def run(num_tokens: int = num_tokens) -> None:
            run_pass(num_tokens)

        pass_s = shortest_time(run, budget_s=MEASURING_BUDGET_S)
        seconds = pass_s / num_tokens
        # more tokens would take longer and not change the result: swapping is much cheaper
        if pass_s > MEASURING_BUDGET_S / 4:
            break
    return seconds


def shortest_time(
    function: Callable[[], Any], repeats: int = 3, budget_s: float = math.inf
) -> float:
    """Seconds of the fastest of several runs, that is, without disturbance.

    The first run, which may set things up, is not timed, unless it alone exceeds `budget_s`: it is
    then the result.
    """
    begin, seconds = time.perf_counter(), []
    for run in range(1 + repeats):
        start = time.perf_counter()
        function()
        now = time.perf_counter()
        if now - begin > budget_s:
            return min([*seconds, now - start])
        if run:
            seconds.append(now - start)
    return min(seconds)
