"""Measures what passes of different sizes cost, as an engine that drafts starts.

Must not know: torch, what runs a pass, how many drafts are chosen.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ....ipc.config import SchedulerConfig, resolved

logger = logging.getLogger(__name__)

# Rows of logits in one step, where max_num_seqs is less: more are not worth their cost on a CPU.
MOST_ROWS = 64
MEASURED_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # of passes whose time is measured at start-up
MEASURING_ROUNDS, MEASURING_BUDGET_S = 20, 0.3
MEASURED_AT_LEAST = 4  # counts: up to 8 tokens


class PassTimes(NamedTuple):
    """Seconds of a pass by its number of tokens, ascending: of the model; of the one that drafts,
    if there is one; and of a pass that verifies drafts, where it is not as any other.
    """

    model: dict[int, float]
    draft: dict[int, float] | None
    verify: dict[int, float] | None = None


def max_num_logits(scheduler_config: SchedulerConfig) -> int:
    """The most rows of logits of one step."""
    rows = scheduler_config.max_num_seqs
    if scheduler_config.speculative_config is not None:
        rows = max(rows, MOST_ROWS)
    return min(rows, resolved(scheduler_config.max_num_batched_tokens))


def measure_passes(
    scheduler_config: SchedulerConfig,
    run_pass: Callable[[int], None],
    run_draft_pass: Callable[[int], None],
    clock: Callable[[], float],
    verify: Callable[[int], None] | None = None,
) -> PassTimes | None:
    """What passes cost; None of an engine that doesn't ask. `run_pass` and `run_draft_pass`, of the
    model and of the one that drafts, take a number of tokens, each with logits, and return when
    they are computed. verify: a pass of the model as drafts are verified on a GPU, where other
    passes are replayed from graphs, and the first of each compiles kernels; None: as any other.
    clock: measures seconds of these passes.
    """
    wanted = scheduler_config.speculative_config
    if wanted is None or not wanted.adaptive:
        return None
    measure = partial(_measured, wanted.method, clock, verify is not None)
    most_rows = max_num_logits(scheduler_config)
    counts = [count for count in MEASURED_TOKENS if count <= most_rows]
    times, draft_times, verify_times = measure("a pass", run_pass, counts), None, None
    if wanted.draft_model_config is not None:
        counts = [count for count in counts if count <= scheduler_config.max_num_seqs]
        draft_times = measure("a draft", run_draft_pass, counts)
    if verify is not None:
        counts = [count for count in MEASURED_TOKENS if 1 < count <= most_rows]
        verify_times = measure("a pass with drafts", verify, counts)
    return PassTimes(times, draft_times, verify_times)


def _measured(
    method: str,
    clock: Callable[[], float],
    is_compiled: bool,
    what: str,
    run_pass: Callable[[int], None],
    counts: Sequence[int],
) -> dict[int, float]:
    """is_compiled: by the first run of each count, which is not measured."""
    for count in counts if is_compiled else ():
        run_pass(count)
    costs = measure_costs(run_pass, counts, clock)
    logger.info(
        "speculation by %s: %s of %s tokens takes %s ms",
        method,
        what,
        ", ".join(map(str, costs)),
        ", ".join(f"{1000 * seconds:.2f}" for seconds in costs.values()),
    )
    return costs


def cpu_clock(num_threads: int) -> Callable[[], float]:
    """Seconds of CPU time of each thread that runs the model: other programs may hold the cores."""
    if num_threads == 1:
        return time.thread_time
    # one thread may have slept while the others worked
    return lambda: time.process_time() / num_threads


gpu_clock = time.perf_counter  # of passes that are waited for
# Of a pass on a CPU with the host's work for it, by the thread that has a share of both.
cpu_step_clock = time.thread_time


def measure_costs(
    run_pass: Callable[[int], None], counts: Sequence[int], clock: Callable[[], float]
) -> dict[int, float]:
    """Seconds of a pass by its number of tokens: of MEASURED_AT_LEAST counts, and of those that fit
    in the budget.

    The counts take turns, each until it has had its share of the budget, and the fastest run of
    each counts: what disturbs the machine disturbs all of them.
    """
    share = MEASURING_BUDGET_S / len(counts)
    costs: dict[int, float] = {}
    spent, wanted = dict.fromkeys(counts, 0.0), list(counts)
    for _ in range(MEASURING_ROUNDS):
        for count in wanted:
            is_late = sum(spent.values()) > MEASURING_BUDGET_S
            if is_late and len(costs) >= MEASURED_AT_LEAST:
                return costs
            start = clock()
            run_pass(count)
            seconds = clock() - start
            costs[count] = min(costs.get(count, math.inf), seconds)
            spent[count] += seconds
        wanted = [count for count in wanted if spent[count] < share]
    return costs


class PassCosts:
    """`costs`: seconds of a pass by its number of tokens, ascending."""

    def __init__(self, costs: dict[int, float]):
        self._tokens, seconds = list(costs), list(costs.values())
        # fewer tokens take no longer: what says otherwise was disturbed
        self._seconds = [min(seconds[index:]) for index in range(len(seconds))]

    def __call__(self, num_tokens: int) -> float:
        """Seconds of a pass with so many tokens: interpolated, beyond the last in proportion."""
        tokens, seconds = self._tokens, self._seconds
        after = bisect_left(tokens, num_tokens)
        if after == len(tokens):
            return seconds[-1] * num_tokens / tokens[-1]
        if not after:
            return seconds[0]
        share = (num_tokens - tokens[after - 1]) / (tokens[after] - tokens[after - 1])
        return seconds[after - 1] + share * (seconds[after] - seconds[after - 1])
