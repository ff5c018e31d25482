"""The second half of a step: admits waiting requests.

Must not know: the rows of running requests, how a token is computed.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right, insort
from collections.abc import Collection
from operator import attrgetter
from typing import TYPE_CHECKING

from ...ipc.step_messages import NewRequestData
from ..request import Request, RequestStatus
from .admission import Start, find_start, has_room, num_missing_blocks
from .owners import Owner
from .step import ScheduledStep, add_row, most_samples

if TYPE_CHECKING:
    from .scheduler import Scheduler

_by_key = attrgetter("key")


def schedule_waiting(
    scheduler: Scheduler, step: ScheduledStep, budget: int, made_room: Collection[Request] = ()
) -> str:
    """Admits the request whose turn it is while there are budget, slots and blocks.

    No request overtakes one that does not fit; a request that waits for its sibling's prompt, or
    for an adapter, is passed over. Those in `made_room` were preempted in this step. Returns what
    the first lacks, "budget", "slots", "blocks" or "adapter", or "preemption" if it is one of
    these, or was preempted while a step samples its token; "" if none waits for these.
    """
    lora_slots = scheduler.lora_slots
    if lora_slots.is_stuck:
        return "adapter"
    lora_slots.begin_pass()
    reason = _admit_in_order(scheduler, step, budget, made_room)
    # a request that waits for a sibling may start without a change here
    is_stuck = reason == "adapter" and not (step.output.new_requests or lora_slots.has_siblings)
    lora_slots.end_pass(is_stuck=is_stuck)
    return reason


def _admit_in_order(
    scheduler: Scheduler, step: ScheduledStep, budget: int, made_room: Collection[Request]
) -> str:
    passed: dict[Owner, int] = {}  # requests that wait for a sibling or an adapter, by owner
    num_reserved, layout = None, scheduler.kv_cache_manager.layout
    num_samples_left = most_samples(scheduler, len(scheduler.running) + len(scheduler.waiting))
    num_samples_left -= sum(map(bool, step.num_expected))
    reason = ""
    while (request := scheduler.waiting.next(passed)) is not None:
        if budget <= 0 or not scheduler.free_slots:
            return "budget" if budget <= 0 else "slots"
        if request in made_room or request.num_pending_tokens:
            return "preemption"
        adapter = request.adapter
        if adapter is not None and not scheduler.lora_slots.may_start(adapter):
            passed[request.owner] = passed.get(request.owner, 0) + 1
            reason = "adapter"
            continue
        start = find_start(scheduler.kv_cache_manager, request)
        if start is None:  # nor may the rest of its family start
            assert request.family is not None
            scheduler.lora_slots.has_siblings = True
            passed[request.owner] = bisect_right(
                request.owner.waiting, request.family.last_key, key=_by_key
            )
            continue
        if num_reserved is None:
            num_reserved = sum(num_missing_blocks(layout, other) for other in scheduler.running)
        num_tokens = min(request.num_tokens - start.num_tokens, scheduler.max_chunk_tokens)
        if num_tokens > budget:
            if not scheduler.enable_chunked_prefill:
                return "budget"
            num_tokens = budget
        is_whole = start.num_tokens + num_tokens == request.num_tokens
        if is_whole and num_samples_left <= 0:
            return "budget"
        if not has_room(scheduler.kv_cache_manager, num_reserved, request, start):
            return "blocks"
        block_ids = scheduler.kv_cache_manager.begin(
            request, num_tokens, start.blocks, start.num_tokens
        )
        if block_ids is None:
            return "blocks"
        if start.num_loaded and not scheduler.kv_cache_manager.load(
            request, len(start.blocks[0]), start.num_loaded
        ):
            continue  # it starts without them
        scheduler.waiting.start(request)
        admit(scheduler, step, request, start, block_ids)
        add_row(scheduler, step, request, num_tokens, 0, block_ids)
        budget -= num_tokens
        num_samples_left -= is_whole
        num_reserved += num_missing_blocks(layout, request)
    return reason


def admit(
    scheduler: Scheduler, step: ScheduledStep, request: Request, start: Start, block_ids: list[int]
) -> None:
    num_blocks = len(start.blocks[0])
    if start.source is not None:
        num_in_group = len(block_ids) // len(start.source)
        copies = block_ids[num_blocks::num_in_group]
        step.output.blocks_to_copy.extend(
            (source.block_id, copy) for source, copy in zip(start.source, copies, strict=True)
        )
        scheduler.counters.num_blocks_copied += len(copies)
    if request.num_swapped_tokens:
        pairs = scheduler.kv_cache_manager.swap_in(request, num_blocks)
        step.output.blocks_to_swap_in.extend(pairs)
        scheduler.counters.num_blocks_swapped_in += len(pairs)
        request.num_swapped_tokens = 0
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = start.num_tokens
    request.slot = heapq.heappop(scheduler.free_slots)
    insort(scheduler.running, request, key=_by_key)
    adapter, lora_request = request.adapter, None
    if adapter is not None:
        scheduler.lora_slots.start(adapter, scheduler.num_steps)
        lora_request = adapter.numbered()
    if request.family is not None:
        request.family.note_start(request)
    if request.scheduled_time == 0.0:
        request.scheduled_time = time.monotonic()
    # hits after a preemption are its own old blocks and say nothing about the cache
    if request.num_cached_tokens is None:
        request.num_cached_tokens = min(start.num_tokens, request.num_prompt_tokens)
        if (
            scheduler.kv_cache_manager.enable_caching
            and request.reads_prefix_cache
            and not start.is_fork
        ):
            num_loaded = start.num_loaded * scheduler.kv_cache_manager.block_size
            num_hit = start.num_tokens - num_loaded
            scheduler.kv_cache_manager.record_prefix_query(request.num_tokens, num_hit)
            if (offload := scheduler.kv_cache_manager.offload) is not None:
                offload.record_query(request.num_tokens - num_hit, num_loaded)
    step.output.new_requests.append(
        NewRequestData(
            slot=request.slot,
            request_id=request.request_id,
            token_ids=request.token_ids.copy(),  # the runner's copy grows by itself
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            eos_token_ids=request.eos_token_ids,
            lora_request=lora_request,
            cache_salt=request.cache_salt,
        )
    )
