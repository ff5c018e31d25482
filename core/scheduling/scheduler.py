"""Decides what each step computes: which requests, how many tokens of each, who waits and who is
preempted; and when a request ends.

Must not know: torch, sockets, or how a token is computed.

There is no prefill or decode phase. Every request has tokens (prompt and output) and a count of
computed ones; a step moves the counts towards the lengths under one token budget, running requests
first, then waiting ones. A prompt that exceeds the remaining budget is split. A decode is a request
with one token left to compute.

Requests that run, and those of one owner that wait, are sorted by the same key: arrival, or
(priority, arrival). The head of `running` is never preempted and always finishes, since one
sequence of max_model_len fits the cache alone. A preempted request keeps its place, so the first of
an owner's requests is its first that runs, or its next to be admitted. This one rule gives FCFS and
priority scheduling, and cannot livelock. `owners.py` decides whose turn it is, and `shares.py` what
each owner may hold while others wait.

A step may be scheduled while the previous one runs. Tokens that the previous one samples are
pending: counted but unknown. A request that turns out to have ended has one row too many, whose
sample is ignored (`update_from_output`). Where a model has stages, a request with a pending token
is in no further step, and each step has its part of the requests (`most_samples`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import astuple

from ...ipc.block_offload import BlockOffload
from ...ipc.config import EngineConfig
from ...ipc.counters import EngineCounters, SchedulerStats, make_stats
from ...ipc.models.kv_layout import MAX_BURST, lookahead_of, make_layout
from ...ipc.models.ranks import num_steps_in_flight
from ...ipc.step_messages import ModelRunnerOutput, PreemptionCosts, SchedulerOutput
from ..kv_cache.events import KVEvents
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..kv_cache.offload import OffloadedBlocks
from ..kv_cache.state_checkpoints import StateCheckpoints
from ..output_rows import OutputRows
from . import integrity, results
from .preemption import PreemptionPolicy
from .shares import BackgroundTurns, share_step
from .state import SchedulerState, StepLimits
from .step import ScheduledStep, admit_waiting, admit_with_adapters, begin_step, schedule_running


class Scheduler(SchedulerState):
    """Call `schedule`, execute the step, call `update_from_output`, and so on."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_host_blocks: int = 0,
        costs: PreemptionCosts = PreemptionCosts(),
        burst_weights_bytes: int = 0,
        kv_cache_windows: Sequence[int] = (0,),
        offload: BlockOffload | None = None,
        max_num_seqs: int | None = None,
        num_state_checkpoints: int | None = None,
    ):
        """`num_host_blocks`: blocks of host memory for preempted requests; `costs`: of bringing one
        back, see PreemptionPolicy; `burst_weights_bytes`, `kv_cache_windows`, `offload`,
        `max_num_seqs` (None: as configured) and `num_state_checkpoints`: see Executor.
        """
        keeps_states = num_state_checkpoints is not None
        limits = StepLimits.of(config, burst_weights_bytes, max_num_seqs, keeps_states)
        counters = EngineCounters()
        layout = make_layout(config, kv_cache_windows)
        most_ahead = lookahead_of(MAX_BURST, limits.num_tokens_per_pass) if limits.drafts else 0
        most_ahead *= num_steps_in_flight(config)
        is_shared = config.cache_config.sends_kv
        offloaded = None
        if offload is not None:
            offloaded = OffloadedBlocks(offload, counters, is_shared=is_shared)
        manager = KVCacheManager(
            num_blocks,
            layout,
            config.cache_config.enable_prefix_caching,
            num_host_blocks,
            max_spare_tokens=most_ahead,
            events=KVEvents(layout) if config.cache_config.publishes_kv_events else None,
            offload=offloaded,
            checkpoints=_make_checkpoints(config, num_state_checkpoints, counters, offloaded),
        )
        mode = config.scheduler_config.preemption_mode
        policy = PreemptionPolicy(mode, costs, layout)
        super().__init__(config, limits, manager, policy, counters)
        self._background = BackgroundTurns()

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if there is nothing to compute.

        Counts what it schedules as computed, because steps may overlap.
        """
        owners, made_room, shares = self.waiting.owners.values(), [], None
        if len(owners) > 1 or any(owner.is_background for owner in owners):
            made_room, shares = share_step(self, self._background)
        step = begin_step(self, shares)
        budget, preempted = schedule_running(self, step)
        offload = self.kv_cache_manager.offload
        if offload is not None and step.output.blocks_to_swap_out:
            offload.suspend()
        if preempted:  # a preempted request must not take back the room at once
            step.stopped_by = "preemption"
        elif self.limits.uses_loras:
            step.stopped_by = admit_with_adapters(self, step, budget, made_room)
        elif self.waiting:
            step.stopped_by = admit_waiting(self, step, budget, made_room)
        if offload is not None:
            offload.flush()
        if not step.requests:
            return self.schedule() if self._background.resume() else None
        self.num_steps += 1
        self.next_output = SchedulerOutput(self.num_steps)
        return step

    def update_from_output(
        self, step: ScheduledStep, result: ModelRunnerOutput, rows: OutputRows
    ) -> None:
        """See results.update_from_output."""
        results.update_from_output(self, step, result, rows)
        if (offload := self.kv_cache_manager.offload) is not None:
            offload.end_step()

    # ------------------------------------------------------------ for observers

    def stats(self) -> SchedulerStats:
        manager = self.kv_cache_manager
        if manager.offload is not None:
            manager.offload.count_transfers()
        pool, num_swapped = manager.block_pool, manager.num_swapped_requests
        num_waiting = len(self.waiting) + len(self.held) - num_swapped
        requests = len(self.running), num_waiting, num_swapped
        return make_stats(*astuple(self.counters), *requests, pool.num_free_blocks, pool.num_blocks)

    def state(self) -> dict[str, Any]:
        """Which requests are in which list, as plain values."""
        return integrity.describe(self)

    def check_integrity(self) -> None:
        """Raises AssertionError if the state is not consistent."""
        integrity.check_integrity(self)


def _make_checkpoints(
    config: EngineConfig,
    num_places: int | None,
    counters: EngineCounters,
    offload: OffloadedBlocks | None,
) -> StateCheckpoints | None:
    """num_places: see Executor.num_state_checkpoints."""
    if num_places is None:
        return None
    # also where memory has room for the states of fewer requests at a time
    first = config.scheduler_config.max_num_seqs
    return StateCheckpoints(
        range(first, first + num_places),
        config.cache_config.block_size,
        config.cache_config.state_checkpoint_interval,
        counters,
        is_cache=config.cache_config.enable_prefix_caching,
        offload=offload,
    )
