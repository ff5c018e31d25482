"""The requests of an engine: which list each is in, and what it holds.

Must not know: which request runs in a step, torch, sockets, rows for clients.

    add_request ──▶ waiting ──▶ running ──▶ finish
                    ▲    held   │
                    └─ preempt ─┘
"""

from __future__ import annotations

import heapq
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ...ipc.config import EngineConfig, resolved
from ...ipc.counters import EngineCounters
from ...ipc.kv_events import CPU, DISK, KVCacheEvent
from ...ipc.messages import EngineCoreRequest, FinishReason
from ...ipc.step_messages import SchedulerOutput
from ..forks import Family
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..lora_slots import Adapter, LoraSlots
from ..request import FINISHED_STATUS, Request, RequestStatus, split
from .images import ImagePlanner
from .owners import WaitingQueue
from .preemption import PreemptionPolicy

_by_key = attrgetter("key")

# Where a model has stages, a step computes at most this many tokens of one prompt, so that all
# stages have a part of a long prompt at the same time. A smaller number would use the weights less.
MAX_STAGE_CHUNK_TOKENS = 256
# Where a model has stages, this many requests take about as long as half of them, since a step
# reads all weights (tests/bench/LEDGER.md). Dividing them between two steps would gain nothing.
LEAST_SAMPLES, LEAST_SAMPLES_INT4 = 8, 4

# On a CPU this many rows take about the time per row that more of them take, and others that come
# wait for the step. A GPU computes more rows in the time in which it reads the weights.
MAX_BACKGROUND_TOKENS = 64


@dataclass(slots=True)
class StepLimits:
    """What a step may hold, from the configuration."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int  # of one request
    enable_chunked_prefill: bool
    uses_priority: bool
    owners_by_name: bool
    uses_loras: bool
    num_stages: int  # as many steps run at the same time, with different requests
    least_samples: int  # requests in a step before others are kept for the next one
    drafts: bool
    recomputes_drafts: bool  # those that are accepted: the model's states end before them
    num_tokens_per_pass: int  # that a row may get in a pass of the model, drafts included
    # passes of the model in a step; 0: the scheduler chooses
    num_scheduler_steps: int
    max_background_tokens: int  # that a step computes while all its owners are in the background
    # by the weights' bytes the scheduler chooses the number of passes; 0: it takes one
    burst_weights_bytes: int

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        burst_weights_bytes: int = 0,
        max_num_seqs: int | None = None,
        keeps_states: bool = False,
    ) -> StepLimits:
        """burst_weights_bytes and max_num_seqs (None: as configured): see Executor."""
        scheduling = config.scheduler_config
        budget = resolved(scheduling.max_num_batched_tokens)
        num_stages = config.device_config.pipeline_parallel_size
        max_chunk_tokens = budget
        # without chunks a prompt is computed at once or waits, so there is nothing to split
        if scheduling.enable_chunked_prefill:
            max_chunk_tokens = scheduling.long_prefill_token_threshold or budget
            if num_stages > 1:
                max_chunk_tokens = min(max_chunk_tokens, MAX_STAGE_CHUNK_TOKENS)
        is_on_cpu = config.device_config.device == "cpu"
        is_int4 = config.model_config.quantization == "int4"
        drafting = scheduling.speculative_config
        num_drafts = 0 if drafting is None else drafting.num_speculative_tokens
        # overlapped stepping hides the work outside the model and does not need bursts
        is_free = scheduling.num_scheduler_steps == 0 and not scheduling.async_scheduling
        recomputes_drafts = keeps_states and drafting is not None
        # in further passes without drafts a state would go on, which the next step has to know
        is_one_pass = recomputes_drafts and scheduling.async_scheduling
        return cls(
            max_model_len=resolved(config.model_config.max_model_len),
            max_num_seqs=max_num_seqs or scheduling.max_num_seqs,
            max_num_batched_tokens=budget,
            max_chunk_tokens=max_chunk_tokens,
            enable_chunked_prefill=scheduling.enable_chunked_prefill,
            uses_priority=scheduling.scheduling_policy == "priority",
            owners_by_name=scheduling.owners_by_name,
            uses_loras=config.lora_config.enable_lora,
            num_stages=num_stages,
            least_samples=LEAST_SAMPLES_INT4 if is_int4 else LEAST_SAMPLES,
            drafts=drafting is not None,
            recomputes_drafts=recomputes_drafts,
            num_tokens_per_pass=1 + num_drafts,
            num_scheduler_steps=1 if is_one_pass else scheduling.num_scheduler_steps,
            max_background_tokens=min(
                budget, MAX_BACKGROUND_TOKENS if is_on_cpu else max(1, budget // 4)
            ),
            burst_weights_bytes=burst_weights_bytes if is_free else 0,
        )


class SchedulerState:
    """Owns the requests, their slots, and what the runner must still learn of them."""

    def __init__(
        self,
        config: EngineConfig,
        limits: StepLimits,
        kv_cache_manager: KVCacheManager,
        preemption: PreemptionPolicy,
        counters: EngineCounters,
    ):
        self.limits = limits
        self.kv_cache_manager = kv_cache_manager
        checkpoints = kv_cache_manager.checkpoints
        # how many tokens a row may have; None: as many as there are
        self.fit_to_checkpoints: Callable[..., int] | None = None
        if checkpoints is not None and limits.enable_chunked_prefill:
            self.fit_to_checkpoints = checkpoints.fit
        self.images = ImagePlanner.of(config, counters)  # None: the model reads no images
        self.preemption = preemption
        self.counters = counters
        self.requests: dict[str, Request] = {}
        self.families: dict[str, Family] = {}  # by the id of a message with n > 1
        self.waiting = WaitingQueue(
            max_debt=limits.max_num_batched_tokens, by_name=limits.owners_by_name
        )
        self.running: list[Request] = []  # sorted by key
        self.held: dict[str, Request] = {}  # in order of arrival; see hold_arrivals
        self.lora_slots = LoraSlots(config.lora_config.max_loras)
        self.unused_adapters: list[Adapter] = []  # their last request has ended; core/loras.py
        # a heap: the lowest is taken first, which keeps the runner's batch compact
        self.free_slots = list(range(limits.max_num_seqs))
        self.num_steps = 0
        # how many draft tokens were accepted, by their position in a draft
        self.accepted_per_pos = [0] * (limits.num_tokens_per_pass - 1)
        self._is_holding = False
        self._first_held_arrival = 0
        self._num_arrivals = 0
        self.deadlines: list[tuple[float, str]] = []  # a heap; some may have ended
        # Slots that are left and copies that are decided between two steps. The next step that has
        # rows brings them to the runner.
        self.next_output = SchedulerOutput(step=0)
        self._offload_medium = DISK if config.cache_config.kv_offloading_path else CPU

    # ------------------------------------------------------------ requests come

    def add_request(
        self,
        message: EngineCoreRequest,
        client_index: int = 0,
        arrival: int | None = None,
        queued_time: float | None = None,
        adapter: Adapter | None = None,
        hashes: Sequence[bytes] = (),
    ) -> None:
        """Adds a validated request whose id is not in use; n > 1 makes n of it.

        Arrival is the order of these calls, or a reserved place: clients' clocks are not trusted.
        `queued_time`: if not now. `adapter`: of its lora_request. `hashes`: of blocks, if known.
        """
        arrival = self.reserve_arrivals(message.num_completions) if arrival is None else arrival
        if message.num_completions > 1:
            return self._add_family(message, client_index, arrival, queued_time, adapter, hashes)
        request = Request(
            message,
            max_model_len=self.limits.max_model_len,
            client_index=client_index,
            key=(message.priority if self.limits.uses_priority else 0, arrival),
            queued_time=time.monotonic() if queued_time is None else queued_time,
            owner=self.waiting.enter(client_index, message.owner, message.owner_weight),
            adapter=adapter,
            block_hashes=[*hashes],
        )
        self.requests[request.request_id] = request
        if message.deadline:
            heapq.heappush(self.deadlines, (message.deadline, request.request_id))
        if self.limits.uses_loras:
            self.lora_slots.enter(adapter)
        if self._is_holding and self.is_held_back(arrival):
            self.held[request.request_id] = request
        else:
            self.waiting.add(request)

    def _add_family(
        self,
        message: EngineCoreRequest,
        client_index: int,
        arrival: int,
        queued_time: float | None,
        adapter: Adapter | None,
        hashes: Sequence[bytes],
    ) -> None:
        """The requests of a message with n > 1 are held back together, or not."""
        children = split(message)
        queued_time = time.monotonic() if queued_time is None else queued_time
        for place, child in enumerate(children, start=arrival):
            self.add_request(child, client_index, place, queued_time, adapter, hashes)
        members = [self.requests[child.request_id] for child in children]
        family = self.families[message.request_id] = Family(message.request_id, members)
        for member in members:
            member.family = family

    def is_in_use(self, request_id: str) -> bool:
        return request_id in self.requests or request_id in self.families

    def reserve_arrivals(self, count: int) -> int:
        """Reserves `count` places in the order of arrival for a request that is added later;
        returns the first.
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
        self.lora_slots.reconsider()
        for request in self.held.values():
            self.waiting.add(request)
        self.held.clear()

    # ------------------------------------------------------------ requests go

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
        """The earliest deadline of the requests, by time.monotonic()."""
        while self.deadlines and self.deadlines[0][1] not in self.requests:
            heapq.heappop(self.deadlines)
        return self.deadlines[0][0] if self.deadlines else None

    def has_late_requests(self) -> bool:
        """Whether the deadline of a request has passed."""
        deadline = self.next_deadline
        return deadline is not None and deadline <= time.monotonic()

    def pop_late_request(self) -> Request:
        """Returns the request with the earliest deadline, which no longer counts."""
        return self.requests[heapq.heappop(self.deadlines)[1]]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """The only way out: the request leaves its list, its slot and its blocks."""
        if request.status is RequestStatus.RUNNING:
            del self.running[bisect_left(self.running, request.key, key=_by_key)]
        elif self.held.pop(request.request_id, None) is None:
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
        if self.limits.uses_loras and (unused := self.lora_slots.leave(request.adapter)):
            self.unused_adapters.append(unused)
        request.status = FINISHED_STATUS[reason]
        count_end(self.counters, reason)

    def _release_slot(self, request: Request) -> None:
        if request.slot is not None:
            heapq.heappush(self.free_slots, request.slot)
            self.next_output.freed_slots.append(request.slot)
            request.slot = None
            if request.adapter is not None:
                self.lora_slots.release(request.adapter, self.num_steps)

    def _leave_host(self, request: Request) -> None:
        """Frees its host memory, and cancels copies to it."""
        freed = self.kv_cache_manager.free_host_blocks(request)
        copies = self.next_output.blocks_to_swap_out
        copies[:] = [pair for pair in copies if pair[1] not in freed]
        if self.kv_cache_manager.checkpoints is not None:
            place = self.kv_cache_manager.checkpoints.unpark(request)
            state_copies = self.next_output.state_copies
            state_copies[:] = [pair for pair in state_copies if pair[1] != place]
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
        checkpoints = manager.checkpoints
        if checkpoints is not None and not family.has_unstarted:
            checkpoints.unshare(family)
        if not family.members:
            del self.families[family.request_id]
        elif has_prompt and not is_parked and family.find_source() is None:
            # of no use where each member has to compute the prompt
            if checkpoints is None or checkpoints.shared_by(family) is not None:
                family.parked = manager.park(request, manager.num_shareable(request))

    # ------------------------------------------------------------ requests lose their place

    def preempt(self, victim: Request, may_swap: bool = True) -> None:
        """Preempts the request, which is already out of `running`.

        It loses its slot and blocks and waits in its place, to be recomputed or with its KV entries
        in host memory.
        """
        slot = victim.slot
        self._release_slot(victim)
        may_swap = may_swap and self.preemption.prefers_swap(victim)
        pairs = self._swap_out(victim, slot) if may_swap else None
        if pairs is not None:
            self.next_output.blocks_to_swap_out.extend(pairs)
            self.counters.num_blocks_swapped_out += len(pairs)
            victim.status = RequestStatus.SWAPPED
            victim.num_swapped_tokens = victim.num_computed_tokens
        else:
            self.kv_cache_manager.free(victim)
            victim.status = RequestStatus.PREEMPTED
            victim.num_computed_before_preemption = max(
                victim.num_computed_tokens, victim.num_computed_before_preemption
            )
        victim.num_computed_tokens = victim.num_executed_tokens = 0
        victim.note_preemption(time.monotonic())
        self.waiting.add(victim)
        self.lora_slots.reconsider()
        self.counters.num_preemptions += 1

    def _swap_out(self, victim: Request, slot: int | None) -> list[tuple[int, int]] | None:
        """The copies to make, (device, host), so that the victim can continue. None if there is no
        room for its blocks, or for its state, which was in `slot`.
        """
        checkpoints = self.kv_cache_manager.checkpoints
        if checkpoints is None:
            return self.kv_cache_manager.swap_out(victim)
        place = checkpoints.park(victim)
        if place is None:
            return None
        pairs = self.kv_cache_manager.swap_out(victim)
        if pairs is None:
            checkpoints.unpark(victim)
            return None
        assert slot is not None  # it was running
        self.next_output.state_copies.append((slot, place))
        return pairs

    def preempt_all(self) -> None:
        """Preempts all requests by recompute: they release blocks and slots and continue from the
        queue.

        Called between steps.
        """
        if self.images is not None:
            self.images.clear()
        while self.running:
            self.preempt(self.running.pop(), may_swap=False)
        for request in self.waiting:
            if request.num_swapped_tokens:
                request.num_computed_before_preemption = max(
                    request.num_swapped_tokens, request.num_computed_before_preemption
                )
                request.status = RequestStatus.PREEMPTED
                self._leave_host(request)

    # ------------------------------------------------------------ the prefix cache

    def take_kv_events(self) -> list[KVCacheEvent]:
        """What the prefix cache has learned and forgotten since the last call."""
        events, offload = self.kv_cache_manager.events, self.kv_cache_manager.offload
        if events is None:
            return []
        if offload is not None:
            events.changed(self._offload_medium, *offload.take_changes())
        return events.take()

    def keep_cached_blocks(self, most_bytes: int = sys.maxsize) -> None:
        """Stores what the cache has and no request holds, before it is lost, if there is a place
        for it: blocks and states that were used last, at most so many bytes.
        """
        manager = self.kv_cache_manager
        if manager.offload is not None:
            free = [
                block for block in manager.block_pool.free_queue if block.block_hash is not None
            ]
            states = [] if manager.checkpoints is None else manager.checkpoints.kept()
            manager.offload.store_all(free, states, most_bytes)

    def reset_prefix_cache(self) -> bool:
        was_reset = self.kv_cache_manager.reset_prefix_cache()
        if was_reset and self.images is not None:
            self.images.clear()
        return was_reset


def count_end(counters: EngineCounters, reason: FinishReason) -> None:
    """Counts the end of an accepted request; refused ones count in num_requests_refused only."""
    match reason:
        case FinishReason.STOP:
            counters.num_finished_stop += 1
        case FinishReason.LENGTH:
            counters.num_finished_length += 1
        case FinishReason.ABORT:
            counters.num_finished_abort += 1
        case FinishReason.ERROR:
            counters.num_finished_error += 1
        case FinishReason.TIMEOUT:
            counters.num_finished_timeout += 1
