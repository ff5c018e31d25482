"""Decides what each step computes: which requests, how many tokens of each, who waits and who is preempted; and when a request ends.
May know: requests, the KV cache manager, slots of the model runner, the step's messages.
Must not know: torch, sockets, or how a token comes about.

There is no prefill and no decode here. Every request has tokens (prompt and output) and a count of those computed; a step moves the
counts towards the lengths under one budget, running requests first, then waiting ones. A prompt too long for what is left of the budget
is cut; a request with one token to go is what others call decoding.

Both lists are sorted by the same key: arrival, or (priority, arrival). The head of `running` therefore never gives way, and always
finishes, since one sequence of max_model_len fits the cache alone; whoever gives way is last in `running` and so among the first of
`waiting`. That is FCFS with victims at the front of the queue, and priority scheduling, in one rule, and it cannot livelock."""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ..ipc.config import EngineConfig
from ..ipc.messages import EngineCoreRequest, FinishReason, ModelRunnerOutput, NewRequestData, SchedulerOutput, SchedulerStats, SlotLogprobs
from .counters import Counters
from .kv_cache_manager import KVCacheManager
from .output_rows import OutputRows
from .request import Request, RequestStatus

_by_key = attrgetter("key")


@dataclass(slots=True)
class ScheduledStep:
    """A step on its way through the executor: what it is told, and whose the rows are. `requests` is parallel with `output.slots`."""

    output: SchedulerOutput
    requests: list[Request]


class Scheduler:
    """Owns the requests and their slots. One call of `schedule`, one execution, one call of `update_from_output`, and so on."""

    def __init__(self, config: EngineConfig, num_blocks: int):
        scheduling = config.scheduler_config
        self.max_model_len = config.model_config.max_model_len
        self.max_num_seqs = scheduling.max_num_seqs
        self.max_num_batched_tokens = scheduling.max_num_batched_tokens
        self.enable_chunked_prefill = scheduling.enable_chunked_prefill
        # Without chunks a prompt is computed at once or waits, so there is nothing to cut.
        threshold = scheduling.long_prefill_token_threshold if scheduling.enable_chunked_prefill else 0
        self.max_chunk_tokens = threshold or self.max_num_batched_tokens
        self.uses_priority = scheduling.scheduling_policy == "priority"
        self.kv_cache_manager = KVCacheManager(num_blocks, config.cache_config.block_size, config.cache_config.enable_prefix_caching)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []  # sorted by key
        self.running: list[Request] = []  # sorted by key
        self.held: dict[str, Request] = {}  # in order of arrival; see hold_arrivals
        self._is_holding, self._first_held_arrival = False, 0
        self.counters = Counters()
        self.num_steps = 0
        self._num_arrivals = 0
        self._free_slots = list(range(self.max_num_seqs))  # a heap: the lowest is taken first, which keeps the runner's batch compact
        self._freed_slots: list[int] = []  # since the last step; the runner has not heard of them yet

    # ------------------------------------------------------------ requests come and go

    def add_request(self, message: EngineCoreRequest, client_index: int = 0, arrival: int | None = None) -> None:
        """Takes a validated request whose id is not in use. Arrival is the order of these calls, or what was reserved earlier: clients'
        clocks are not trusted."""
        if arrival is None:
            arrival = self.reserve_arrivals(1)
        key = (message.priority if self.uses_priority else 0, arrival)
        request = Request(message, max_model_len=self.max_model_len, client_index=client_index, key=key)
        self.requests[request.request_id] = request
        if self.is_held_back(arrival):
            self.held[request.request_id] = request
        else:
            insort(self.waiting, request, key=_by_key)

    def reserve_arrivals(self, count: int) -> int:
        """The next place in the order of arrival, and `count` - 1 behind it, for a request that is added later."""
        self._num_arrivals += count
        return self._num_arrivals - count

    def hold_arrivals(self) -> None:
        """Requests that come from now on are kept apart: they are not scheduled until release_arrivals."""
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
        """Ends this client's requests among `request_ids`; returns those that were alive. Called between steps."""
        aborted = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and request.client_index == client_index:
                self._finish(request, FinishReason.ABORT)
                aborted.append(request)
        return aborted

    def preempt_all(self) -> None:
        """By recompute: nobody holds a block or a slot afterwards, and everybody goes on from the queue. Called between steps."""
        while self.running:
            self._preempt(self.running.pop())

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """The one way out: the request leaves its list, its slot and its blocks."""
        if self.held.pop(request.request_id, None) is None:
            queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
            del queue[bisect_left(queue, request.key, key=_by_key)]
        self._release_slot(request)
        if reason is FinishReason.ERROR:
            self.kv_cache_manager.discard(request)
        else:
            self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        request.finish(reason)
        self.counters.count_end(reason)

    def _release_slot(self, request: Request) -> None:
        if request.slot is not None:
            heapq.heappush(self._free_slots, request.slot)
            self._freed_slots.append(request.slot)
            request.slot = None

    # ------------------------------------------------------------ before the model runs

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nobody has anything to compute. Counts what it schedules as computed: the step may overlap others."""
        step = ScheduledStep(SchedulerOutput(self.num_steps, [], [], [], [], [], self._freed_slots), [])
        budget, preempted = self._schedule_running(step)
        if not preempted:  # a victim must not come straight back and take the room it was made to leave
            self._schedule_waiting(step, budget)
        if not step.requests:
            return None
        self._freed_slots = []
        self.num_steps += 1
        return step

    def _schedule_running(self, step: ScheduledStep) -> tuple[int, bool]:
        """Gives every running request its tokens, in order, preempting from the end for blocks. Returns (budget left, any preempted)."""
        budget, preempted = self.max_num_batched_tokens, False
        running, allocate_slots = self.running, self.kv_cache_manager.allocate_slots
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            num_tokens = min(len(request.token_ids) - request.num_computed_tokens, self.max_chunk_tokens, budget)
            block_ids = allocate_slots(request, num_tokens)
            if block_ids is None:
                self._preempt(running.pop())  # perhaps `request` itself; if not, it tries again
                preempted = True
                continue
            self._add_row(step, request, num_tokens, block_ids)
            budget -= num_tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(self, step: ScheduledStep, budget: int) -> None:
        """Admits from the head of the queue while there are budget, slots and blocks. Nobody overtakes a head that does not fit."""
        while self.waiting and budget > 0 and self._free_slots:
            request = self.waiting[0]
            computed_blocks = self.kv_cache_manager.get_computed_blocks(request)
            num_hit_tokens = len(computed_blocks) * self.kv_cache_manager.block_size
            num_tokens = min(request.num_tokens - num_hit_tokens, self.max_chunk_tokens)
            if num_tokens > budget:
                if not self.enable_chunked_prefill:
                    break
                num_tokens = budget
            block_ids = self.kv_cache_manager.allocate_slots(request, num_tokens, computed_blocks)
            if block_ids is None:
                break
            del self.waiting[0]
            self._admit(step, request, num_hit_tokens)
            self._add_row(step, request, num_tokens, block_ids)
            budget -= num_tokens

    def _admit(self, step: ScheduledStep, request: Request, num_hit_tokens: int) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        request.slot = heapq.heappop(self._free_slots)
        insort(self.running, request, key=_by_key)
        if request.scheduled_time == 0.0:
            request.scheduled_time = time.monotonic()
        if request.num_cached_tokens is None:  # hits after a preemption are its own old blocks: they say nothing about the cache
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
            if self.kv_cache_manager.enable_caching and request.reads_prefix_cache:
                self.kv_cache_manager.record_prefix_query(request.num_tokens, num_hit_tokens)
        step.output.new_requests.append(
            NewRequestData(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=request.token_ids.copy(),  # the runner's copy grows by itself
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                eos_token_ids=request.eos_token_ids,
            )
        )

    def _add_row(self, step: ScheduledStep, request: Request, num_tokens: int, block_ids: list[int]) -> None:
        computed, output = request.num_computed_tokens, step.output
        step.requests.append(request)
        output.slots.append(request.slot)
        output.num_scheduled_tokens.append(num_tokens)
        output.num_computed_tokens.append(computed)
        output.new_block_ids.append(block_ids)
        request.num_computed_tokens = computed + num_tokens
        if computed < request.num_prompt_tokens:
            self.counters.num_prompt_tokens += min(num_tokens, request.num_prompt_tokens - computed)
        if computed < request.num_computed_before_preemption:
            num_recomputed_tokens = min(num_tokens, request.num_computed_before_preemption - computed)
            request.num_recomputed_tokens += num_recomputed_tokens
            self.counters.num_recomputed_tokens += num_recomputed_tokens

    def _preempt(self, victim: Request) -> None:
        """By recompute: the victim, already out of `running`, loses blocks and slot and waits to compute prompt and output anew."""
        self._release_slot(victim)
        self.kv_cache_manager.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_before_preemption = max(victim.num_computed_tokens, victim.num_computed_before_preemption)
        victim.num_computed_tokens = 0
        victim.note_preemption(time.monotonic())
        insort(self.waiting, victim, key=_by_key)
        self.counters.num_preemptions += 1

    # ------------------------------------------------------------ after the model ran

    def update_from_output(self, step: ScheduledStep, result: ModelRunnerOutput, rows: OutputRows) -> None:
        """Takes the sampled tokens, ends the requests that end with them, and writes the clients' rows."""
        rows.stamp()
        scheduled, logprobs = step.output, {entry.slot: entry for entry in result.logprobs}
        prompt_logprobs = {entry.slot: entry for entry in result.prompt_logprobs}
        cursor = 0
        for index, request in enumerate(step.requests):
            slot, num_sampled = scheduled.slots[index], result.num_sampled[index]
            token_ids = result.token_ids[cursor : cursor + num_sampled]
            cursor += num_sampled
            if slot in result.errors:
                self._fail(request, result.errors[slot], rows)
                continue
            num_computed_tokens = scheduled.num_computed_tokens[index] + scheduled.num_scheduled_tokens[index]
            self.kv_cache_manager.cache_blocks(request, num_computed_tokens)
            if slot in prompt_logprobs:
                client_rows = rows.of(request.client_index)
                client_rows.add(request.request_id, request.num_output_tokens, [])
                client_rows.add_prompt_logprobs(prompt_logprobs[slot])
            if num_sampled:
                self._append_tokens(request, token_ids, rows, logprobs.get(slot))

    def _append_tokens(self, request: Request, token_ids: list[int], rows: OutputRows, logprobs: SlotLogprobs | None) -> None:
        first_index = request.num_output_tokens
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
            self._finish(request, reason)

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
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.held),
            num_free_blocks=manager.num_free_blocks,
            num_blocks=len(manager.block_pool.blocks),
            prefix_cache_queries=manager.prefix_cache_queries,
            prefix_cache_hits=manager.prefix_cache_hits,
            **self.counters.as_dict(),
        )

    def state(self) -> dict[str, Any]:
        """Who is where, for people and tests; plain values."""
        return {
            "step": self.num_steps,
            "running": [request.request_id for request in self.running],
            "waiting": [request.request_id for request in self.waiting],
            "held": list(self.held),
            "num_free_slots": len(self._free_slots),
            "num_free_blocks": self.kv_cache_manager.num_free_blocks,
            "num_cached_blocks": self.kv_cache_manager.block_pool.num_cached_blocks,
            "kv_cache_usage": self.kv_cache_manager.usage,
        }

    def check_integrity(self) -> None:
        """Every request is in exactly one list, in order; slots and blocks are held by running requests alone. Raises AssertionError."""
        self.kv_cache_manager.check_integrity(self.running)
        slots = sorted(self._free_slots + [request.slot for request in self.running])
        expected = {
            "requests are exactly those listed": sorted(self.requests) == sorted([*self.held, *(r.request_id for r in self.running + self.waiting)]),
            "running is sorted": self.running == sorted(self.running, key=_by_key),
            "waiting is sorted": self.waiting == sorted(self.waiting, key=_by_key),
            "each slot is free or held once": slots == list(range(self.max_num_seqs)),
            "running requests run": all(request.status is RequestStatus.RUNNING for request in self.running),
            "waiting requests hold nothing": all(
                request.slot is None and request.num_computed_tokens == 0 and not request.is_finished
                for request in (*self.waiting, *self.held.values())
            ),
            "nobody computed more than there is": all(0 < r.num_computed_tokens <= r.num_tokens for r in self.running),
        }
        broken = [claim for claim, holds in expected.items() if not holds]
        if broken:
            raise AssertionError(f"the scheduler does not hold that {'; '.join(broken)}: {self.state()}")
