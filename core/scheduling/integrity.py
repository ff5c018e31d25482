"""A scheduler's state in plain values, and the check that it is consistent.

Must not know: how the state came about; nothing is changed here.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..request import RequestStatus

if TYPE_CHECKING:
    from .scheduler import Scheduler

_by_key = attrgetter("key")


def describe(scheduler: Scheduler) -> dict[str, Any]:
    """Which request is in which list, for people and tests."""
    return {
        "step": scheduler.num_steps,
        "running": [request.request_id for request in scheduler.running],
        "waiting": [
            request.request_id
            for request in scheduler.waiting
            if request.status is not RequestStatus.SWAPPED
        ],
        "swapped": [
            request.request_id
            for request in scheduler.waiting
            if request.status is RequestStatus.SWAPPED
        ],
        "held": list(scheduler.held),
        "num_free_slots": len(scheduler.free_slots),
        "num_free_blocks": scheduler.kv_cache_manager.num_free_blocks,
        "num_cached_blocks": scheduler.kv_cache_manager.block_pool.num_cached_blocks,
        "kv_cache_usage": scheduler.kv_cache_manager.usage,
    }


def check_integrity(scheduler: Scheduler) -> None:
    """Raises AssertionError unless every request is in exactly one list, in order, and only running
    requests hold slots and blocks.
    """
    swapped = [request for request in scheduler.waiting if request.status is RequestStatus.SWAPPED]
    scheduler.kv_cache_manager.check_integrity(scheduler.running, swapped)
    held_slots = [request.slot for request in scheduler.running if request.slot is not None]
    slots = sorted(scheduler.free_slots + held_slots)
    expected = {
        "requests are exactly those listed": sorted(scheduler.requests)
        == sorted(
            [*scheduler.held, *(r.request_id for r in (*scheduler.running, *scheduler.waiting))]
        ),
        "each request counts for its owner": Counter(
            request.owner.identity for request in scheduler.requests.values()
        )
        == {identity: owner.num_requests for identity, owner in scheduler.waiting.owners.items()},
        "running is sorted": scheduler.running == sorted(scheduler.running, key=_by_key),
        "waiting is sorted": all(
            owner.waiting == sorted(owner.waiting, key=_by_key)
            for owner in scheduler.waiting.owners.values()
        ),
        "waiting requests are counted": len(scheduler.waiting) == len(list(scheduler.waiting)),
        "each slot is free or held once": slots == list(range(scheduler.max_num_seqs)),
        "running requests run": all(
            request.status is RequestStatus.RUNNING for request in scheduler.running
        ),
        "waiting requests hold nothing": all(
            request.slot is None and request.num_computed_tokens == 0 and not request.is_finished
            for request in (*scheduler.waiting, *scheduler.held.values())
        ),
        "no request computed more tokens than it has": all(
            0 < r.num_computed_tokens <= r.num_tokens + r.num_pending_tokens
            for r in scheduler.running
        ),
        "swapped requests left something to swap": all(
            (r in swapped) == (r.num_swapped_tokens > 0) for r in scheduler.requests.values()
        ),
        "at most max_loras adapters are in use": len(scheduler.lora_slots.active)
        <= scheduler.lora_slots.max_loras,
        "adapters in use are those of running requests": Counter(
            {adapter: adapter.num_running for adapter in scheduler.lora_slots.active}
        )
        == Counter(r.adapter for r in scheduler.running if r.adapter is not None),
        "families are of unfinished requests": sorted(
            request_id for family in scheduler.families.values() for request_id in family.members
        )
        == sorted(r.request_id for r in scheduler.requests.values() if r.family is not None),
    }
    broken = [claim for claim, holds in expected.items() if not holds]
    if broken:
        raise AssertionError(
            f"the scheduler does not hold that {'; '.join(broken)}: {describe(scheduler)}"
        )
