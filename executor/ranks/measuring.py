"""What several ranks measure as they start, and agree on: all take the same decisions later.

Must not know: processes, messages, what a rank does.

Passes are timed here, where each is begun once for all ranks: what ranks would time by themselves
differs, also in how many passes it takes, and they would wait for each other.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from ...ipc.config import EngineConfig
from ...ipc.step_messages import PreemptionCosts
from ..preemption_costs import measure_recompute
from ..runner.speculation.pass_costs import measure_passes

logger = logging.getLogger(__name__)


class CallRanks(Protocol):
    """Calls a method of all ranks' workers, and returns the results in rank order."""

    def __call__(self, method: str, *args: Any) -> list[Any]: ...


def open_swap_space(call: CallRanks, config: EngineConfig) -> tuple[int, PreemptionCosts]:
    """See Executor.initialize_swap_space. Each rank has its part of each block; a request is moved
    once the slowest rank has moved its parts.
    """
    rooms = [room for room in call("plan_swap_space") if room is not None]
    num_blocks = min(rooms, default=0)
    swap_costs = call("open_swap_space", num_blocks)
    if config.scheduler_config.preemption_mode != "auto" or not num_blocks:
        return num_blocks, PreemptionCosts()

    def run_pass(num_tokens: int) -> None:
        call("run_pass", num_tokens)

    recompute_s = measure_recompute(run_pass, config.scheduler_config)
    costs = PreemptionCosts(recompute_s, *(max(some) for some in zip(*swap_costs, strict=True)))
    logger.info("swap space: %d blocks; %s", num_blocks, costs)
    return num_blocks, costs


def share_pass_times(call: CallRanks, config: EngineConfig) -> None:
    """Measures what passes of an engine that drafts cost, if it asks, and tells all ranks. The
    caches are allocated.
    """

    def run_pass(num_tokens: int) -> None:
        call("run_pass", num_tokens, num_tokens)

    def run_draft_pass(num_tokens: int) -> None:
        call("run_draft_pass", num_tokens)

    # the time of the slowest rank; this process computes nothing
    clock = time.perf_counter
    times = measure_passes(config.scheduler_config, run_pass, run_draft_pass, clock)
    if times is not None:
        call("use_pass_times", times.model, times.draft)
