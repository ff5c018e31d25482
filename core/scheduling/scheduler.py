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

import heapq
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import astuple

from ...ipc.block_offload import BlockOffload
from ...ipc.config import EngineConfig, resolved
from ...ipc.counters import EngineCounters, SchedulerStats, make_stats
from ...ipc.kv_events import CPU, DISK, KVCacheEvent
from ...ipc.messages import EngineCoreRequest, FinishReason
from ...ipc.models.kv_layout import MAX_BURST, lookahead_of, make_layout
from ...ipc.step_messages import ModelRunnerOutput, PreemptionCosts, SchedulerOutput
from ..forks import Family
from ..kv_cache.events import KVEvents
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..kv_cache.offload import OffloadedBlocks
from ..output_rows import OutputRows
from ..request import Request, RequestStatus, split
from . import integrity, results
from .lora_slots import Adapter, LoraSlots
from .owners import WaitingQueue
from .preemption import PreemptionPolicy
from .running import schedule_running
from .shares import divide_budget, preempt_for_others
from .step import ScheduledStep
from .waiting import schedule_waiting

_by_key = attrgetter("key")

# Of one prompt in a step, where a model has stages: so that all have a part of a long prompt at the
# same time. A smaller number would use the weights less.
MAX_STAGE_CHUNK_TOKENS = 256
# Where a model has stages: so many requests take about the time of half of them, since a step reads
# all weights (tests/bench/LEDGER.md), and to divide them among two steps would gain nothing.
LEAST_SAMPLES, LEAST_SAMPLES_INT4 = 8, 4


class Scheduler:
    """Owns the requests and their slots.

    Call `schedule`, execute the step, call `update_from_output`, and so on.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_host_blocks: int = 0,
        costs: PreemptionCosts = PreemptionCosts(),
        burst_weights_bytes: int = 0,
        kv_cache_windows: Sequence[int] = (0,),
        offload: BlockOffload | None = None,
    ):
        """`num_host_blocks`: blocks of host memory for preempted requests; `costs`: of bringing one
        back, see PreemptionPolicy; `burst_weights_bytes`, `kv_cache_windows` and `offload`: see
        Executor.
        """
        scheduling, self.counters = config.scheduler_config, EngineCounters()
        self.max_model_len = resolved(config.model_config.max_model_len)
        self.max_num_seqs = scheduling.max_num_seqs
        self.max_num_batched_tokens = resolved(scheduling.max_num_batched_tokens)
        self.enable_chunked_prefill = scheduling.enable_chunked_prefill
        # Without chunks a prompt is computed at once or waits, so there is nothing to split.
        threshold = (
            scheduling.long_prefill_token_threshold if scheduling.enable_chunked_prefill else 0
        )
        self.max_chunk_tokens: int = threshold or self.max_num_batched_tokens
        # a step for each stage at the same time, of different requests
        self.num_stages = config.device_config.pipeline_parallel_size
        # requests in a step before others are kept for the next one
        is_int4 = config.model_config.quantization == "int4"
        self.least_samples = LEAST_SAMPLES_INT4 if is_int4 else LEAST_SAMPLES
        if self.num_stages > 1 and scheduling.enable_chunked_prefill:
            self.max_chunk_tokens = min(self.max_chunk_tokens, MAX_STAGE_CHUNK_TOKENS)
        self.uses_priority = scheduling.scheduling_policy == "priority"
        self.drafts = scheduling.speculative_config is not None
        # tokens that a row may get in a pass of the model, drafts included
        self.num_tokens_per_pass = 1
        if scheduling.speculative_config is not None:
            self.num_tokens_per_pass += scheduling.speculative_config.num_speculative_tokens
        # of a step that may verify drafts in several passes; 0: as many as take little time
        self.num_drafting_passes = scheduling.num_scheduler_steps if self.drafts else 0
        # of the step that is being scheduled
        self.num_lookahead_slots = lookahead_of(
            max(1, scheduling.num_scheduler_steps), self.num_tokens_per_pass
        )
        # Overlapped stepping hides the work outside the model and does not need it.
        is_free = scheduling.num_scheduler_steps == 0 and not scheduling.async_scheduling
        self.burst_weights_bytes = burst_weights_bytes if is_free else 0
        layout = make_layout(config, kv_cache_windows)
        self.preemption = PreemptionPolicy(scheduling.preemption_mode, costs, layout)
        self.kv_cache_manager = KVCacheManager(
            num_blocks,
            layout,
            config.cache_config.enable_prefix_caching,
            num_host_blocks,
            max_spare_tokens=lookahead_of(MAX_BURST, self.num_tokens_per_pass)
            if self.drafts
            else 0,
            events=KVEvents(layout) if config.cache_config.publishes_kv_events else None,
            offload=None if offload is None else OffloadedBlocks(offload, self.counters),
        )
        self._offload_medium = DISK if config.cache_config.kv_offloading_path else CPU
        self.requests: dict[str, Request] = {}
        # by the id of a message with n > 1
        self.families: dict[str, Family] = {}
        self.waiting = WaitingQueue(max_debt=self.max_num_batched_tokens)
        self.running: list[Request] = []  # sorted by key
        self.lora_slots = LoraSlots(config.lora_config.max_loras)
        self.unused_adapters: list[Adapter] = []  # their last request has ended; core/loras.py
        self.held: dict[str, Request] = {}  # in order of arrival; see hold_arrivals
        self._is_holding, self._first_held_arrival = False, 0
        self._deadlines: list[tuple[float, str]] = []  # a heap; some may have ended
        # of the draft tokens at each position of a draft, those that were accepted
        self.accepted_per_pos = [0] * (self.num_tokens_per_pass - 1)
        self.num_steps = 0
        self._num_arrivals = 0
        # a heap: the lowest is taken first, which keeps the runner's batch compact
        self.free_slots = list(range(self.max_num_seqs))
        # Since the last step; not sent to the runner yet.
        self._freed_slots: list[int] = []
        self._blocks_to_swap_out: list[tuple[int, int]] = []

    # ------------------------------------------------------------ requests come and go

    def add_request(
        self,
        message: EngineCoreRequest,
        client_index: int = 0,
        arrival: int | None = None,
        queued_time: float | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Adds a validated request whose id is not in use; n > 1 makes n of it.

        Arrival is the order of these calls, or a reserved place: clients' clocks are not trusted.
        `queued_time`: when the engine received it, if not now. `adapter`: of its lora_request.
        """
        requests = []
        if arrival is None:
            arrival = self.reserve_arrivals(message.num_completions)
        for place, child in enumerate(split(message), start=arrival):
            key = (child.priority if self.uses_priority else 0, place)
            request = Request(
                child,
                max_model_len=self.max_model_len,
                client_index=client_index,
                key=key,
                queued_time=queued_time,
                owner=self.waiting.enter(client_index, child.owner, child.owner_weight),
                adapter=adapter,
            )
            self.requests[request.request_id] = request
            if adapter is not None:
                adapter.num_users += 1
            if child.deadline:
                heapq.heappush(self._deadlines, (child.deadline, request.request_id))
            if self.is_held_back(arrival):
                self.held[request.request_id] = request
            else:
                self.waiting.add(request)
            requests.append(request)
        self.lora_slots.is_stuck = False
        if len(requests) > 1:
            family = self.families[message.request_id] = Family(message.request_id, requests)
            for request in requests:
                request.family = family

    def is_in_use(self, request_id: str) -> bool:
        return request_id in self.requests or request_id in self.families

    def reserve_arrivals(self, count: int) -> int:
        """Reserves `count` places in the order of arrival for a request that is added later;
        returns
        the first.
        """
        self._num_arrivals += count
        return self._num_arrivals - count

    def hold_arrivals(self) -> None:
        """Holds requests that arrive from now on: they are not scheduled until release_arrivals."""
        if not self._is_holding:
            self._is_holding, self._first_held_arrival = True, self._num_arrivals

    def is_held_back(self, arrival: int) -> bool:
        """Whether a request with this place in the order arrived after hold_arrivals."""
        return self._is_holding and arrival >= self._first_held_arrival

    def release_arrivals(self) -> None:
        self._is_holding = False
        self.lora_slots.is_stuck = False
        for request in self.held.values():
            self.waiting.add(request)
        self.held.clear()

    def abort_requests(self, request_ids: Iterable[str], client_index: int) -> list[Request]:
        """Ends this client's requests among `request_ids`; a parent's id means all its children.

        Returns those that were alive. Called between steps.
        """
        aborted = []
        for request_id in request_ids:
            known, family = self.requests.get(request_id), self.families.get(request_id)
            members = list(family.members.values()) if family is not None else []
            for request in [known] if known is not None else members:
                if request.client_index == client_index:
                    self.finish(request, FinishReason.ABORT)
                    aborted.append(request)
        return aborted

    @property
    def next_deadline(self) -> float | None:
        """By time.monotonic(), of the requests there are."""
        while self._deadlines and self._deadlines[0][1] not in self.requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def has_late_requests(self) -> bool:
        """Whether the deadline of a request has passed."""
        if not self._deadlines:
            return False
        deadline = self.next_deadline
        return deadline is not None and deadline <= time.monotonic()

    def pop_late_request(self) -> Request:
        """The one with the earliest deadline, which no longer counts."""
        return self.requests[heapq.heappop(self._deadlines)[1]]

    def preempt_all(self) -> None:
        """Preempts all requests by recompute: they release blocks and slots and continue from the
        queue.

        Called between steps.
        """
        while self.running:
            self.preempt(self.running.pop(), may_swap=False)
        for request in self.waiting:
            if request.num_swapped_tokens:
                request.num_computed_before_preemption = max(
                    request.num_swapped_tokens, request.num_computed_before_preemption
                )
                request.status = RequestStatus.PREEMPTED
                self._leave_host(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """The only way out: the request leaves its list, its slot and its blocks."""
        if self.held.pop(request.request_id, None) is None:
            if request.status is RequestStatus.RUNNING:
                del self.running[bisect_left(self.running, request.key, key=_by_key)]
            else:
                self.waiting.remove(request)
        self._release_slot(request)
        if request.family is not None:
            self._leave_family(request, request.family, reason)
        if reason is FinishReason.ERROR:
            self.kv_cache_manager.discard(request)
        else:
            self.kv_cache_manager.free(request)
        if request.num_swapped_tokens:
            self._leave_host(request)
        del self.requests[request.request_id]
        self.waiting.leave(request.owner)
        self.lora_slots.is_stuck = False
        if (adapter := request.adapter) is not None:
            adapter.num_users -= 1
            if not adapter.num_users:
                self.unused_adapters.append(adapter)
        request.finish(reason)
        self.counters.count_end(str(reason))

    def _leave_host(self, request: Request) -> None:
        """Frees its host memory, and cancels copies to it."""
        freed = self.kv_cache_manager.free_host_blocks(request)
        self._blocks_to_swap_out = [
            pair for pair in self._blocks_to_swap_out if pair[1] not in freed
        ]
        request.num_swapped_tokens = 0

    def _leave_family(self, request: Request, family: Family, reason: FinishReason) -> None:
        """Called while the request still holds its blocks.

        If it was the last to hold the prompt's blocks, these stay findable for members that have
        not started.
        """
        manager = self.kv_cache_manager
        has_prompt = family.has_prompt(request) and reason is not FinishReason.ERROR
        family.leave(request)
        is_parked = family.parked is not None and manager.holds_parked(family.parked)
        if family.parked is not None and not (is_parked and family.members):
            manager.unpark(family.parked)
            family.parked = None
        if not family.members:
            del self.families[family.request_id]
        elif has_prompt and not is_parked and family.find_source() is None:
            family.parked = manager.park(request, request.num_prompt_tokens - 1)

    def _release_slot(self, request: Request) -> None:
        if request.slot is not None:
            heapq.heappush(self.free_slots, request.slot)
            self._freed_slots.append(request.slot)
            request.slot = None
            if request.adapter is not None:
                self.lora_slots.release(request.adapter, self.num_steps)

    # ------------------------------------------------------------ before the model runs

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if there is nothing to compute.

        Counts what it schedules as computed, because steps may overlap.
        """
        output = SchedulerOutput(
            self.num_steps,
            [],
            [],
            [],
            [],
            [],
            self._freed_slots,
            [],
            self._blocks_to_swap_out,
            [],
            [],
        )
        step, offload = ScheduledStep(output), self.kv_cache_manager.offload
        made_room = preempt_for_others(self)
        budget, preempted = schedule_running(self, step, divide_budget(self))
        if offload is not None and self._blocks_to_swap_out:
            offload.suspend()
        # a preempted request must not take back the room at once
        step.stopped_by = (
            "preemption" if preempted else schedule_waiting(self, step, budget, made_room)
        )
        if offload is not None:
            offload.flush()
        if not step.requests:
            return None
        self._freed_slots, self._blocks_to_swap_out = [], []
        self.num_steps += 1
        return step

    def preempt(self, victim: Request, may_swap: bool = True) -> None:
        """Preempts the request, which is already out of `running`.

        It loses its slot and blocks and waits in its place, to be recomputed or with its KV entries
        in host memory.
        """
        self._release_slot(victim)
        pairs = (
            self.kv_cache_manager.swap_out(victim)
            if may_swap and self.preemption.prefers_swap(victim)
            else None
        )
        if pairs is not None:
            self._blocks_to_swap_out.extend(pairs)
            self.counters.num_blocks_swapped_out += len(pairs)
            victim.status, victim.num_swapped_tokens = (
                RequestStatus.SWAPPED,
                victim.num_computed_tokens,
            )
        else:
            self.kv_cache_manager.free(victim)
            victim.status = RequestStatus.PREEMPTED
            victim.num_computed_before_preemption = max(
                victim.num_computed_tokens, victim.num_computed_before_preemption
            )
        victim.num_computed_tokens = victim.num_executed_tokens = 0
        victim.note_preemption(time.monotonic())
        self.waiting.add(victim)
        self.lora_slots.is_stuck = False
        self.counters.num_preemptions += 1

    def update_from_output(
        self, step: ScheduledStep, result: ModelRunnerOutput, rows: OutputRows
    ) -> None:
        """See results.update_from_output."""
        results.update_from_output(self, step, result, rows)

    # ------------------------------------------------------------ for observers

    def take_kv_events(self) -> list[KVCacheEvent]:
        """What the prefix cache has learned and forgotten since the last call."""
        events, offload = self.kv_cache_manager.events, self.kv_cache_manager.offload
        if events is None:
            return []
        if offload is not None:
            events.changed(self._offload_medium, *offload.take_changes())
        return events.take()

    def keep_cached_blocks(self, most: int = sys.maxsize) -> None:
        """Stores what the cache has and no request holds, before it is lost: the `most` blocks that
        were used last, if there is a place for them.
        """
        manager = self.kv_cache_manager
        if manager.offload is not None:
            free = [
                block for block in manager.block_pool.free_queue if block.block_hash is not None
            ]
            manager.offload.store_all(free[-most:])

    def reset_prefix_cache(self) -> bool:
        return self.kv_cache_manager.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        manager = self.kv_cache_manager
        self.counters.prefix_cache_queries = manager.prefix_cache_queries
        self.counters.prefix_cache_hits = manager.prefix_cache_hits
        num_swapped = manager.num_swapped_requests
        return make_stats(
            *astuple(self.counters),
            len(self.running),
            len(self.waiting) + len(self.held) - num_swapped,
            num_swapped,
            manager.num_free_blocks,
            manager.block_pool.num_blocks,
        )

    def state(self) -> dict[str, Any]:
        """Which requests are in which list, as plain values."""
        return integrity.describe(self)

    def check_integrity(self) -> None:
        """Raises AssertionError if the state is not consistent."""
        integrity.check_integrity(self)
