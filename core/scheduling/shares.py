"""What each owner may hold of a step while others wait: its tokens, slots and blocks.

Must not know: the rows of a step, how a token is computed. With one owner, nothing here applies.

An owner's share of everything is its weight divided by the weights of all owners with unfinished
requests. What one does not use is used by the others. They get it back

- in the next step, as tokens of the budget (`divide_budget`): a long prompt delays the requests of
  others by the step that is running;
- by preemption, as slots and blocks (`preempt_for_others`): from the owner that holds the most for
  its weight, as long as that is more than its share.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from ..request import Request, RequestOwner
from .admission import find_start, num_missing_blocks
from .state import SchedulerState


def divide_budget(state: SchedulerState) -> dict[RequestOwner, int] | None:
    """The most tokens that each owner's running requests may compute in this step; None if all
    requests together, waiting ones included, want no more than the budget.

    Shares are max-min fair: what an owner does not want is divided among the others.
    """
    queue, budget = state.waiting, state.limits.max_num_batched_tokens
    if len(queue.owners) < 2 or not state.limits.enable_chunked_prefill:
        return None
    wanted: dict[RequestOwner, int] = dict.fromkeys(queue.owners.values(), 0)
    for request in state.running:
        num_tokens = request.num_tokens + request.num_pending_tokens - request.num_computed_tokens
        wanted[request.owner] += min(num_tokens, state.limits.max_chunk_tokens)
    for owner in wanted:
        for request in islice(owner.waiting, len(state.free_slots)):
            if wanted[owner] >= budget:
                break
            if state.lora_slots.can_use(request.adapter):
                wanted[owner] += min(request.num_tokens, state.limits.max_chunk_tokens)
    if sum(wanted.values()) <= budget:
        return None
    shares, weight = {}, sum(owner.weight for owner in wanted)
    for owner in sorted(wanted, key=lambda owner: (wanted[owner] / owner.weight, owner.served)):
        share = max(min(1, budget), int(budget * owner.weight / weight))
        shares[owner] = min(wanted[owner], share)
        budget -= shares[owner]
        weight -= owner.weight
    return shares


def preempt_for_others(state: SchedulerState) -> list[Request]:
    """Preempts requests so that those whose turn it is can start in this step, if their owner has
    less than its share; returns the preempted ones.

    An owner without a running request may always have one. The head of `running` is not preempted,
    nor is the last running request of an owner.
    """
    queue, manager, preempted = state.waiting, state.kv_cache_manager, []
    first = queue.next({})
    if first is None:
        return preempted
    owner, holdings = first.owner, Holdings(state)
    served = [other.served for other in queue.owners.values() if other.waiting]
    num_tokens, num_slots, num_reserved = 0, len(state.free_slots), None
    for request in islice(owner.waiting, state.limits.max_num_seqs):
        is_others_turn = owner.served + num_tokens / owner.weight > min(served)
        if is_others_turn or num_tokens >= state.limits.max_num_batched_tokens:
            break
        # nor does room help one whose adapter cannot be used in this step
        if not holdings.may_start(request) or not state.lora_slots.can_use(request.adapter):
            break
        start = find_start(manager, request)
        if start is None:  # it waits for a sibling
            break
        if num_reserved is None:
            layout = manager.layout
            num_reserved = sum(num_missing_blocks(layout, other) for other in state.running)
        num_reserved += manager.num_needed(request.num_tokens, start.blocks)
        num_missing = -manager.num_free_after(num_reserved, start.blocks)
        victims = holdings.choose_victims(num_slots < 1, num_missing)
        if victims is None:
            break
        for victim in victims:
            num_reserved -= num_missing_blocks(manager.layout, victim)
            state.running.remove(victim)
            state.preempt(victim)
        preempted += victims
        num_slots += len(victims) - 1
        num_tokens += request.num_tokens - start.num_tokens
        holdings.add(request)
    return preempted


class Holdings:
    """How many slots and blocks each owner has."""

    def __init__(self, state: SchedulerState):
        self._state = state
        self._manager = state.kv_cache_manager
        self._weight = sum(owner.weight for owner in state.waiting.owners.values())
        self._slots: Counter[RequestOwner] = Counter()
        self._blocks: Counter[RequestOwner] = Counter()
        for request in state.running:
            self.add(request)

    def add(self, request: Request, sign: int = 1) -> None:
        num_blocks = self._manager.layout.most_blocks(request.num_tokens)
        self._slots[request.owner] += sign
        self._blocks[request.owner] += sign * num_blocks

    def use(self, owner: RequestOwner) -> float:
        """The larger of its parts of the slots and of the blocks, relative to its share (dominant
        resource fairness, Ghodsi et al. 2011): 1 is exactly its share.
        """
        part = max(
            self._slots[owner] / self._state.limits.max_num_seqs,
            self._blocks[owner] / self._manager.block_pool.num_blocks,
        )
        return part * self._weight / owner.weight

    def may_start(self, request: Request) -> bool:
        """Whether its owner may take from others for it."""
        if not self._slots[request.owner]:
            return True
        self.add(request)
        use = self.use(request.owner)
        self.add(request, sign=-1)
        return use <= 1

    def choose_victims(self, lacks_slot: bool, num_lacking: int) -> list[Request] | None:
        """The requests to preempt for a slot and this many blocks; None if those that may be
        preempted are not enough.
        """
        victims: list[Request] = []
        running = self._state.running[1:]
        while lacks_slot or num_lacking > 0:
            above = [o for o in self._slots if self._slots[o] > 1 and self.use(o) > 1]
            owner = max(above, key=self.use, default=None)
            mine = [r for r in running if r.owner is owner and r not in victims]
            if not mine:
                return None
            victim = max(mine, key=self._state.preemption.order)
            num_lacking -= self._manager.num_blocks_of(victim.request_id)
            num_lacking -= num_missing_blocks(self._manager.layout, victim)
            lacks_slot = False
            victims.append(victim)
            self.add(victim, sign=-1)
        return victims
