"""Decides what each step computes: which requests, how many tokens of each, who waits and who is
preempted; and when a request ends.

Must not know: torch, sockets, or how a token comes about.

There is no prefill and no decode here. Every request has tokens (prompt and output) and a count of
those computed; a step moves the counts towards the lengths under one budget, running requests
first, then waiting ones. A prompt too long for what is left of the budget is cut; a request with
one token to go is what others call decoding.

Both lists are sorted by the same key: arrival, or (priority, arrival). The head of `running` never
gives way, and always finishes, since one sequence of max_model_len fits the cache alone; whoever
gives way keeps its place, so the first of all requests is the head, or the next to be admitted.
That is FCFS and priority scheduling in one rule, and it cannot livelock.

A step may be scheduled while the one before still runs. What that one samples is counted as pending
and not known: a request that turns out to have ended with it has a row too many, whose sample is
ignored (`update_from_output`).
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ...ipc.config import EngineConfig
from ...ipc.messages import (
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    NewRequestData,
    PreemptionCosts,
    SchedulerOutput,
    SchedulerStats,
    SlotLogprobs,
)
from ..counters import Counters
from ..forks import Family
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..output_rows import OutputRows
from ..request import Request, RequestStatus, split
from .admission import Start, find_start, has_room, num_missing_blocks
from .preemption import PreemptionPolicy

_by_key = attrgetter("key")

# Where the scheduler finds by itself how many tokens a step may decode (num_scheduler_steps=0):
# they share what a step costs outside the model, and whoever comes meanwhile waits for all of them.
# So many bytes of weights, once for each token, are some 8 ms of work; it is counted, not measured,
# so that what a step decodes does not depend on the weather.
MAX_BURST, MAX_BURST_BYTES = 8, 320 * 10**6


@dataclass(slots=True)
class ScheduledStep:
    """A step on its way through the executor: what it is told, and whose the rows are.

    The lists are parallel with `output.slots`.
    """

    output: SchedulerOutput
    requests: list[Request] = field(default_factory=list)
    # tokens that the row is going to sample, if nothing goes wrong
    num_expected: list[int] = field(default_factory=list)
    # of the request's tokens, when the step has run
    num_computed: list[int] = field(default_factory=list)
    # rows that compute a prompt, or anew what was preempted; their tokens
    prefills: list[tuple[Request, int]] = field(default_factory=list)
    # its begin and end, on time.monotonic(), and preemptions; observation.py writes it
    scheduling: tuple[float, float, int] = (0.0, 0.0, 0)
    execute_time: float = 0.0  # its execution began; only for steps with prefills


class Scheduler:
    """Owns the requests and their slots.

    One call of `schedule`, one execution, one call of `update_from_output`, and so on.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        num_host_blocks: int = 0,
        costs: PreemptionCosts = PreemptionCosts(),
        burst_weights_bytes: int = 0,
    ):
        """`num_host_blocks`: blocks of host memory for preempted requests; `costs`: what bringing
        one back takes, see PreemptionPolicy; `burst_weights_bytes`: see Executor.
        """
        scheduling = config.scheduler_config
        self.max_model_len = config.model_config.max_model_len
        self.max_num_seqs = scheduling.max_num_seqs
        self.max_num_batched_tokens = scheduling.max_num_batched_tokens
        self.enable_chunked_prefill = scheduling.enable_chunked_prefill
        # Without chunks a prompt is computed at once or waits, so there is nothing to cut.
        threshold = (
            scheduling.long_prefill_token_threshold if scheduling.enable_chunked_prefill else 0
        )
        self.max_chunk_tokens = threshold or self.max_num_batched_tokens
        self.uses_priority = scheduling.scheduling_policy == "priority"
        # of the step that is being scheduled
        self.num_lookahead_slots = max(0, scheduling.num_scheduler_steps - 1)
        # Overlapped stepping hides what is outside the model: it has no need.
        is_free = scheduling.num_scheduler_steps == 0 and not scheduling.async_scheduling
        self._burst_weights_bytes = burst_weights_bytes if is_free else 0
        self.preemption = PreemptionPolicy(scheduling.preemption_mode, costs)
        cache = config.cache_config
        self.kv_cache_manager = KVCacheManager(
            num_blocks, cache.block_size, cache.enable_prefix_caching, num_host_blocks
        )
        self.requests: dict[str, Request] = {}
        # by the id of a message with n > 1
        self._families: dict[str, Family] = {}
        self.waiting: list[Request] = []  # sorted by key
        self.running: list[Request] = []  # sorted by key
        self.held: dict[str, Request] = {}  # in order of arrival; see hold_arrivals
        self._is_holding, self._first_held_arrival = False, 0
        self.counters = Counters()
        self.num_steps = 0
        self._num_arrivals = 0
        # a heap: the lowest is taken first, which keeps the runner's batch compact
        self._free_slots = list(range(self.max_num_seqs))
        # Since the last step; the runner has not heard of them yet.
        self._freed_slots: list[int] = []
        self._blocks_to_swap_out: list[tuple[int, int]] = []

    # ------------------------------------------------------------ requests come and go

    def add_request(
        self,
        message: EngineCoreRequest,
        client_index: int = 0,
        arrival: int | None = None,
        queued_time: float | None = None,
    ) -> None:
        """Takes a validated request whose id is not in use; n > 1 makes n of it.

        Arrival is the order of these calls, or what was reserved earlier: clients' clocks are not
        trusted. `queued_time`: when the engine took it, if that was not now.
        """
        requests = []
        if arrival is None:
            arrival = self.reserve_arrivals(message.sampling_params.n)
        for place, child in enumerate(split(message), start=arrival):
            key = (child.priority if self.uses_priority else 0, place)
            request = Request(
                child,
                max_model_len=self.max_model_len,
                client_index=client_index,
                key=key,
                queued_time=queued_time,
            )
            self.requests[request.request_id] = request
            if self.is_held_back(arrival):
                self.held[request.request_id] = request
            else:
                insort(self.waiting, request, key=_by_key)
            requests.append(request)
        if len(requests) > 1:
            family = self._families[message.request_id] = Family(message.request_id, requests)
            for request in requests:
                request.family = family

    def is_in_use(self, request_id: str) -> bool:
        return request_id in self.requests or request_id in self._families

    def reserve_arrivals(self, count: int) -> int:
        """The next place in the order of arrival, and `count` - 1 behind it, for a request that is
        added later.
        """
        self._num_arrivals += count
        return self._num_arrivals - count

    def hold_arrivals(self) -> None:
        """Requests that come from now on are kept apart: they are not scheduled until
        release_arrivals.
        """
        if not self._is_holding:
            self._is_holding, self._first_held_arrival = True, self._num_arrivals

    def is_held_back(self, arrival: int) -> bool:
        """Whether a request of this place in the order came after hold_arrivals."""
        return self._is_holding and arrival >= self._first_held_arrival

    def release_arrivals(self) -> None:
        self._is_holding = False
        for request in self.held.values():
            insort(self.waiting, request, key=_by_key)
        self.held.clear()

    def abort_requests(self, request_ids: Iterable[str], client_index: int) -> list[Request]:
        """Ends this client's requests among `request_ids`, a parent's id standing for all its
        children; returns those that were alive. Called between steps.
        """
        aborted = []
        for request_id in request_ids:
            known, family = self.requests.get(request_id), self._families.get(request_id)
            members = list(family.members.values()) if family is not None else []
            for request in [known] if known is not None else members:
                if request.client_index == client_index:
                    self._finish(request, FinishReason.ABORT)
                    aborted.append(request)
        return aborted

    def preempt_all(self) -> None:
        """By recompute: nobody holds a block or a slot afterwards, and everybody goes on from the
        queue. Called between steps.
        """
        while self.running:
            self._preempt(self.running.pop(), may_swap=False)
        for request in self.waiting:
            if request.num_swapped_tokens:
                request.num_computed_before_preemption = max(
                    request.num_swapped_tokens, request.num_computed_before_preemption
                )
                request.status = RequestStatus.PREEMPTED
                self._leave_host(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """The one way out: the request leaves its list, its slot and its blocks."""
        if self.held.pop(request.request_id, None) is None:
            queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
            del queue[bisect_left(queue, request.key, key=_by_key)]
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
        request.finish(reason)
        self.counters.count_end(reason)

    def _leave_host(self, request: Request) -> None:
        """What it holds of host memory is free, and nothing is copied there any more."""
        freed = self.kv_cache_manager.free_host_blocks(request)
        self._blocks_to_swap_out = [
            pair for pair in self._blocks_to_swap_out if pair[1] not in freed
        ]
        request.num_swapped_tokens = 0

    def _leave_family(self, request: Request, family: Family, reason: FinishReason) -> None:
        """Called while the request still holds its blocks. Those of the prompt stay findable for
        members that have not begun, if the request was the last that had them.
        """
        manager = self.kv_cache_manager
        has_prompt = family.has_prompt(request) and reason is not FinishReason.ERROR
        family.leave(request)
        is_parked = family.parked is not None and manager.holds_parked(family.parked)
        if family.parked is not None and not (is_parked and family.members):
            manager.unpark(family.parked)
            family.parked = None
        if not family.members:
            del self._families[family.request_id]
        elif has_prompt and not is_parked and family.find_source() is None:
            num_blocks = -(-(request.num_prompt_tokens - 1) // manager.block_size)
            family.parked = manager.park(request, num_blocks)

    def _release_slot(self, request: Request) -> None:
        if request.slot is not None:
            heapq.heappush(self._free_slots, request.slot)
            self._freed_slots.append(request.slot)
            request.slot = None

    # ------------------------------------------------------------ before the model runs

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nobody has anything to compute.

        Counts what it schedules as computed: the step may overlap others.
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
        step = ScheduledStep(output)
        budget, preempted = self._schedule_running(step)
        # a victim must not come straight back and take the room it was made to leave
        if not preempted:
            self._schedule_waiting(step, budget)
        if not step.requests:
            return None
        self._freed_slots, self._blocks_to_swap_out = [], []
        self.num_steps += 1
        return step

    def _schedule_running(self, step: ScheduledStep) -> tuple[int, bool]:
        """Gives every running request its tokens, in order, preempting others for blocks.

        Returns (budget left, any preempted).
        """
        budget, preempted = self.max_num_batched_tokens, False
        if self._burst_weights_bytes:
            self.num_lookahead_slots = self._burst_length() - 1
        running, allocate_slots = self.running, self.kv_cache_manager.allocate_slots
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            num_pending = request.num_pending_tokens
            if num_pending and request.num_tokens_left <= 0:  # its last token is on its way
                index += 1
                continue
            num_tokens = len(request.token_ids) + num_pending - request.num_computed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, self.max_chunk_tokens, budget)
            num_lookahead = (
                self._num_lookahead(request, num_tokens) if self.num_lookahead_slots else 0
            )
            block_ids = allocate_slots(request, num_tokens + num_lookahead)
            # nobody is preempted for what can be done one step later
            if block_ids is None and num_lookahead:
                num_lookahead = 0
                block_ids = allocate_slots(request, num_tokens)
            if block_ids is None:
                # perhaps `request`; if not, it tries again
                self._preempt(running.pop(self.preemption.choose_victim(running, index)))
                preempted = True
                continue
            self._add_row(step, request, num_tokens, num_lookahead, block_ids)
            budget -= num_tokens
            index += 1
        return budget, preempted

    def _burst_length(self) -> int:
        """Tokens of each request that the next step may decode: more than one where nobody waits,
        nobody has a prompt to compute, all can have as many, and it takes little time. Where a
        grammar leaves no choice tokens come without the model, and behind them nothing does.
        """
        length = min(
            MAX_BURST, MAX_BURST_BYTES // (self._burst_weights_bytes * max(1, len(self.running)))
        )
        if self.waiting or length < 2:
            return 1
        for request in self.running:
            decodes = (
                request.num_prompt_tokens < request.num_tokens == request.num_computed_tokens + 1
            )
            if not decodes or request.has_grammar:
                return 1
            length = min(length, request.num_tokens_left)
        return length

    def _num_lookahead(self, request: Request, num_tokens: int) -> int:
        """Tokens to decode behind the row's first sample, if these `num_tokens` are all there are
        to compute.
        """
        if (
            request.num_computed_tokens + num_tokens
            < request.num_tokens + request.num_pending_tokens
        ):
            return 0
        return min(self.num_lookahead_slots, request.num_tokens_left - 1)

    def _schedule_waiting(self, step: ScheduledStep, budget: int) -> None:
        """Admits from the head of the queue while there are budget, slots and blocks.

        Nobody overtakes a head that does not fit; a request
        that waits for the prompt its sibling computes stands aside.
        """
        index, num_reserved, block_size = 0, None, self.kv_cache_manager.block_size
        while index < len(self.waiting) and budget > 0 and self._free_slots:
            request = self.waiting[index]
            start = find_start(self.kv_cache_manager, request)
            if start is None:  # nor may the rest of its family begin
                index = bisect_right(self.waiting, request.family.last_key, key=_by_key)
                continue
            if num_reserved is None:
                num_reserved = sum(num_missing_blocks(block_size, other) for other in self.running)
            num_tokens = min(request.num_tokens - start.num_tokens, self.max_chunk_tokens)
            if num_tokens > budget:
                if not self.enable_chunked_prefill:
                    break
                num_tokens = budget
            if not has_room(self.kv_cache_manager, num_reserved, request, start):
                break
            num_in_blocks = len(start.blocks) * block_size
            block_ids = self.kv_cache_manager.allocate_slots(
                request, start.num_tokens - num_in_blocks + num_tokens, start.blocks
            )
            if block_ids is None:
                break
            del self.waiting[index]
            self._admit(step, request, start, block_ids)
            self._add_row(step, request, num_tokens, 0, block_ids)
            budget -= num_tokens
            num_reserved += num_missing_blocks(block_size, request)

    def _admit(
        self, step: ScheduledStep, request: Request, start: Start, block_ids: list[int]
    ) -> None:
        num_blocks = len(start.blocks)
        if start.source is not None:
            step.output.blocks_to_copy.append((start.source.block_id, block_ids[num_blocks]))
            self.counters.num_blocks_copied += 1
        if request.num_swapped_tokens:
            pairs = self.kv_cache_manager.swap_in(request, num_blocks)
            step.output.blocks_to_swap_in.extend(pairs)
            self.counters.num_blocks_swapped_in += len(pairs)
            request.num_swapped_tokens = 0
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = start.num_tokens
        request.slot = heapq.heappop(self._free_slots)
        insort(self.running, request, key=_by_key)
        if request.family is not None:
            request.family.note_start(request)
        if request.scheduled_time == 0.0:
            request.scheduled_time = time.monotonic()
        # hits after a preemption are its own old blocks: they say nothing about the cache
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(start.num_tokens, request.num_prompt_tokens)
            if (
                self.kv_cache_manager.enable_caching
                and request.reads_prefix_cache
                and not start.is_fork
            ):
                self.kv_cache_manager.record_prefix_query(request.num_tokens, start.num_tokens)
        step.output.new_requests.append(
            NewRequestData(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=request.token_ids.copy(),  # the runner's copy grows by itself
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                eos_token_ids=request.eos_token_ids,
            )
        )

    def _add_row(
        self,
        step: ScheduledStep,
        request: Request,
        num_tokens: int,
        num_lookahead: int,
        block_ids: list[int],
    ) -> None:
        computed, output = request.num_computed_tokens, step.output
        step.requests.append(request)
        output.slots.append(request.slot)
        output.num_scheduled_tokens.append(num_tokens)
        output.num_computed_tokens.append(computed)
        output.new_block_ids.append(block_ids)
        if self.num_lookahead_slots:
            output.num_lookahead_tokens.append(num_lookahead)
        end = computed + num_tokens
        num_expected = (
            1 + num_lookahead if end == len(request.token_ids) + request.num_pending_tokens else 0
        )
        request.num_pending_tokens += num_expected
        request.num_computed_tokens = end = end + num_lookahead
        step.num_expected.append(num_expected)
        step.num_computed.append(end)
        if (
            computed < request.num_prompt_tokens
            or computed < request.num_computed_before_preemption
        ):
            step.prefills.append((request, num_tokens))
            self.counters.num_prompt_tokens += min(
                num_tokens, max(0, request.num_prompt_tokens - computed)
            )
            num_recomputed_tokens = min(
                num_tokens, max(0, request.num_computed_before_preemption - computed)
            )
            request.num_recomputed_tokens += num_recomputed_tokens
            self.counters.num_recomputed_tokens += num_recomputed_tokens

    def _preempt(self, victim: Request, may_swap: bool = True) -> None:
        """The victim, already out of `running`, loses slot and blocks and waits in its place: to
        compute prompt and output anew, or with what it has computed in host memory.
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
        insort(self.waiting, victim, key=_by_key)
        self.counters.num_preemptions += 1

    # ------------------------------------------------------------ after the model ran

    def update_from_output(
        self, step: ScheduledStep, result: ModelRunnerOutput, rows: OutputRows
    ) -> None:
        """Takes the sampled tokens, ends the requests that end with them, and writes the clients'
        rows.
        """
        rows.stamp()
        for request, num_tokens in step.prefills:
            request.note_prefill(step.output.step, step.execute_time, rows.now, num_tokens)
        scheduled, logprobs = step.output, {entry.slot: entry for entry in result.logprobs}
        prompt_logprobs = {entry.slot: entry for entry in result.prompt_logprobs}
        cursor, errors, running, block_size = (
            0,
            result.errors,
            RequestStatus.RUNNING,
            self.kv_cache_manager.block_size,
        )
        for request, slot, num_sampled, num_expected, num_computed in zip(
            step.requests, scheduled.slots, result.num_sampled, step.num_expected, step.num_computed
        ):
            token_ids = result.token_ids[cursor : cursor + num_sampled]
            cursor += num_sampled
            request.num_pending_tokens -= num_expected
            is_running = request.status is running
            if not is_running and request.is_finished:  # since the step was scheduled
                continue
            if slot in prompt_logprobs:
                client_rows = rows.of(request.client_index)
                client_rows.add(request.request_id, request.num_output_tokens, [])
                client_rows.add_prompt_logprobs(prompt_logprobs[slot])
            reason = (
                self._append_tokens(request, token_ids, rows, logprobs.get(slot))
                if num_sampled
                else None
            )
            # behind the tokens that it did sample; if one of them ended the request, what failed
            # was computed in vain
            if slot in errors:
                if reason is None:
                    self._fail(request, errors[slot], rows)
                    continue
            elif is_running:  # else it was preempted while the step ran
                if num_computed > (num_known := len(request.token_ids)):
                    # what was decoded behind a stop was computed in vain, too
                    num_computed = num_known
                if num_computed // block_size > request.num_executed_tokens // block_size:
                    self.kv_cache_manager.cache_blocks(request, num_computed)
                request.num_executed_tokens = num_computed
            if reason is not None:
                self._finish(request, reason)

    def _append_tokens(
        self,
        request: Request,
        token_ids: list[int],
        rows: OutputRows,
        logprobs: SlotLogprobs | None,
    ) -> FinishReason | None:
        """Adds what the row sampled, up to where the request ends; returns why it does, or None.

        Its owner's row is written.
        """
        first_index = len(request.token_ids) - request.num_prompt_tokens
        reason = None
        for count, token_id in enumerate(token_ids, start=1):
            reason = request.append_output_token(token_id)
            if reason is not None:
                token_ids = token_ids[:count]
                break
        self.counters.num_generation_tokens += len(token_ids)
        client_rows = rows.of(request.client_index)
        client_rows.add(request.request_id, first_index, token_ids)
        if first_index == request.report_index:  # the first token, or the first after a preemption
            if first_index == request.num_resumed_tokens and request.first_token_time == 0.0:
                request.first_token_time = rows.now
                client_rows.add_num_cached_tokens(request.num_cached_tokens)
            if reason is None:
                client_rows.add_timing(request, rows.now)
        if logprobs is not None:
            client_rows.add_logprobs(logprobs, len(token_ids))
        if reason is not None:
            client_rows.finish(reason, request.stop_reason)
            client_rows.add_timing(request, rows.now)
        return reason

    def _fail(self, request: Request, error: str, rows: OutputRows) -> None:
        self._finish(request, FinishReason.ERROR)
        client_rows = rows.of(request.client_index)
        client_rows.add(request.request_id, request.num_output_tokens, [])
        client_rows.finish(FinishReason.ERROR, error=error)
        client_rows.add_timing(request, rows.now)

    # ------------------------------------------------------------ what others may see

    def reset_prefix_cache(self) -> bool:
        return self.kv_cache_manager.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        manager = self.kv_cache_manager
        return self.counters.stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.held) - manager.num_swapped_requests,
            num_swapped=manager.num_swapped_requests,
            num_free_blocks=manager.num_free_blocks,
            num_blocks=manager.block_pool.num_blocks,
            prefix_cache_queries=manager.prefix_cache_queries,
            prefix_cache_hits=manager.prefix_cache_hits,
        )

    def state(self) -> dict[str, Any]:
        """Who is where, for people and tests; plain values."""
        return {
            "step": self.num_steps,
            "running": [request.request_id for request in self.running],
            "waiting": [
                request.request_id
                for request in self.waiting
                if request.status is not RequestStatus.SWAPPED
            ],
            "swapped": [
                request.request_id
                for request in self.waiting
                if request.status is RequestStatus.SWAPPED
            ],
            "held": list(self.held),
            "num_free_slots": len(self._free_slots),
            "num_free_blocks": self.kv_cache_manager.num_free_blocks,
            "num_cached_blocks": self.kv_cache_manager.block_pool.num_cached_blocks,
            "kv_cache_usage": self.kv_cache_manager.usage,
        }

    def check_integrity(self) -> None:
        """Every request is in exactly one list, in order; slots and blocks are held by running
        requests alone. Raises AssertionError.
        """
        swapped = [request for request in self.waiting if request.status is RequestStatus.SWAPPED]
        self.kv_cache_manager.check_integrity(self.running, swapped)
        slots = sorted(self._free_slots + [request.slot for request in self.running])
        expected = {
            "requests are exactly those listed": sorted(self.requests)
            == sorted([*self.held, *(r.request_id for r in self.running + self.waiting)]),
            "running is sorted": self.running == sorted(self.running, key=_by_key),
            "waiting is sorted": self.waiting == sorted(self.waiting, key=_by_key),
            "each slot is free or held once": slots == list(range(self.max_num_seqs)),
            "running requests run": all(
                request.status is RequestStatus.RUNNING for request in self.running
            ),
            "waiting requests hold nothing": all(
                request.slot is None
                and request.num_computed_tokens == 0
                and not request.is_finished
                for request in (*self.waiting, *self.held.values())
            ),
            "nobody computed more than there is": all(
                0 < r.num_computed_tokens <= r.num_tokens + r.num_pending_tokens
                for r in self.running
            ),
            "swapped requests left something to swap": all(
                (r in swapped) == (r.num_swapped_tokens > 0) for r in self.requests.values()
            ),
            "families are of unfinished requests": sorted(
                request_id for family in self._families.values() for request_id in family.members
            )
            == sorted(r.request_id for r in self.requests.values() if r.family is not None),
        }
        broken = [claim for claim, holds in expected.items() if not holds]
        if broken:
            raise AssertionError(
                f"the scheduler does not hold that {'; '.join(broken)}: {self.state()}"
            )
