"""A scheduler's state in plain values, and the check that it is consistent.

Must not know: how the state came about; nothing is changed here.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import Any

from ..request import RequestStatus
from .state import SchedulerState

_by_key = attrgetter("key")


def _num_checkpoints(state: SchedulerState) -> int:
    checkpoints = state.kv_cache_manager.checkpoints
    return 0 if checkpoints is None else checkpoints.num_named


def _shares_are_needed(state: SchedulerState) -> bool:
    """Whether checkpoints are kept only for messages of which a member has not started."""
    checkpoints = state.kv_cache_manager.checkpoints
    waiting = {name for name, family in state.families.items() if family.has_unstarted}
    return checkpoints is None or checkpoints.shared_families() <= waiting


def describe(state: SchedulerState) -> dict[str, Any]:
    """Which request is in which list, for people and tests."""
    return {
        "step": state.num_steps,
        "running": [request.request_id for request in state.running],
        "waiting": [
            request.request_id
            for request in state.waiting
            if request.status is not RequestStatus.SWAPPED
        ],
        "swapped": [
            request.request_id
            for request in state.waiting
            if request.status is RequestStatus.SWAPPED
        ],
        "held": list(state.held),
        "num_free_slots": len(state.free_slots),
        "num_free_blocks": state.kv_cache_manager.num_free_blocks,
        "num_cached_blocks": state.kv_cache_manager.block_pool.num_cached_blocks,
        "num_state_checkpoints": _num_checkpoints(state),
        "kv_cache_usage": state.kv_cache_manager.usage,
    }


def check_integrity(state: SchedulerState) -> None:
    """Raises AssertionError unless every request is in exactly one list, in order, and only running
    requests hold slots and blocks.
    """
    swapped = [request for request in state.waiting if request.status is RequestStatus.SWAPPED]
    state.kv_cache_manager.check_integrity(state.running, swapped)
    if state.images is not None:
        state.images.cache.check_integrity()
    held_slots = [request.slot for request in state.running if request.slot is not None]
    slots = sorted(state.free_slots + held_slots)
    expected = {
        "requests are exactly those listed": sorted(state.requests)
        == sorted([*state.held, *(r.request_id for r in (*state.running, *state.waiting))]),
        "each request counts for its owner": Counter(
            request.owner.identity for request in state.requests.values()
        )
        == {identity: owner.num_requests for identity, owner in state.waiting.owners.items()},
        "running is sorted": state.running == sorted(state.running, key=_by_key),
        "waiting is sorted": all(
            owner.waiting == sorted(owner.waiting, key=_by_key)
            for owner in state.waiting.owners.values()
        ),
        "waiting requests are counted": len(state.waiting) == len(list(state.waiting)),
        "each slot is free or held once": slots == list(range(state.limits.max_num_seqs)),
        "running requests run": all(
            request.status is RequestStatus.RUNNING for request in state.running
        ),
        "waiting requests hold nothing": all(
            request.slot is None and request.num_computed_tokens == 0 and not request.is_finished
            for request in (*state.waiting, *state.held.values())
        ),
        "no request computed more tokens than it has": all(
            0 < r.num_computed_tokens <= r.num_tokens + r.num_pending_tokens for r in state.running
        ),
        "swapped requests left something to swap": all(
            (r in swapped) == (r.num_swapped_tokens > 0) for r in state.requests.values()
        ),
        "at most max_loras adapters are in use": len(state.lora_slots.active)
        <= state.lora_slots.max_loras,
        "adapters in use are those of running requests": Counter(
            {adapter: adapter.num_running for adapter in state.lora_slots.active}
        )
        == Counter(r.adapter for r in state.running if r.adapter is not None),
        "families are of unfinished requests": sorted(
            request_id for family in state.families.values() for request_id in family.members
        )
        == sorted(r.request_id for r in state.requests.values() if r.family is not None),
        "states are kept for members that wait": _shares_are_needed(state),
    }
    broken = [claim for claim, holds in expected.items() if not holds]
    if broken:
        raise AssertionError(
            f"the scheduler does not hold that {'; '.join(broken)}: {describe(state)}"
        )
