"""What each owner may hold of a step while others wait: its tokens, slots and blocks.

Must not know: the rows of a step, how a token is computed. With one owner, nothing here applies
unless it is in the background.

An owner's share of everything is its weight divided by the weights of all owners with unfinished
requests. What one does not use is used by the others. They get it back

- in the next step, as tokens of the budget (`divide_budget`): a long prompt delays the requests of
  others by the step that is running;
- by preemption, as slots and blocks (`preempt_for_others`): from the owner that holds the most for
  its weight, as long as that is more than its share.

Owners in the background (`BackgroundTurns`) compute nothing in a step while others have a prompt to
compute, and few tokens while others decode, although the budget has room for more: a row of theirs
would make the step longer for all. By slots and blocks they are owners with a small weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import islice

from ..request import Request, RequestOwner
from .admission import find_start, num_missing_blocks
from .state import SchedulerState

# Beside requests that decode, background owners together compute a token for so many of these, and
# at least one.
ROWS_PER_TOKEN = 4
# Of so many steps in which others have a prompt to compute, one has tokens of background owners, so
# that these end, however busy the engine is.
STEPS_PER_TURN = 16
# For so many steps after others have ended, background owners compute one token in each: a client
# often sends its next request then, which would wait for a long step.
LINGERING_STEPS = 16


class BackgroundTurns:
    """How many tokens background owners may compute in each step, all together."""

    def __init__(self) -> None:
        self._num_alone = self._num_paused = 0  # steps
        self._is_paused = False

    def next(self, state: SchedulerState) -> int:
        """Call it once for each step."""
        self._is_paused, num_rows, has_prompt = False, 0, False
        for request in state.running:
            if not request.owner.is_background:
                num_rows += 1
                start = max(request.num_prompt_tokens, request.num_computed_before_preemption)
                has_prompt |= request.num_computed_tokens < start
        for owner in state.waiting.owners.values():
            # one that waits for an adapter of a request in the background would wait for longer
            if owner.waiting and not owner.is_background:
                has_prompt |= state.lora_slots.can_use(owner.waiting[0].adapter)
        if not num_rows and not has_prompt:
            self._num_alone += 1
            is_lingering = self._num_alone <= LINGERING_STEPS
            return 1 if is_lingering else state.limits.max_background_tokens
        self._num_alone = 0
        if has_prompt:
            self._num_paused += 1
            self._is_paused = self._num_paused % STEPS_PER_TURN > 0
        return 0 if self._is_paused else max(1, num_rows // ROWS_PER_TOKEN)

    def resume(self) -> bool:
        """Whether background owners have given way in the last step, which has no rows: others
        wait for what they hold. The next step is then their turn.
        """
        was_paused, self._is_paused = self._is_paused, False
        if was_paused:
            self._num_paused = -1
        return was_paused


def share_step(
    state: SchedulerState, turns: BackgroundTurns
) -> tuple[list[Request], dict[RequestOwner, int] | None]:
    """Returns (the requests that are preempted for others, the result of divide_budget)."""
    most: dict[RequestOwner, int] = {}
    if any(owner.is_background for owner in state.waiting.owners.values()):
        most = divide_background(state, turns.next(state))
    preempted = preempt_for_others(state, [owner for owner in most if not most[owner]])
    return preempted, divide_budget(state, most)


def divide_background(state: SchedulerState, num_tokens: int) -> dict[RequestOwner, int]:
    """The most tokens that each background owner's requests may compute in this step."""
    owners = [owner for owner in state.waiting.owners.values() if owner.is_background]
    # one may start without a free slot: others are preempted for the first of an owner
    return divide(count_wanted(state, owners, max(1, len(state.free_slots))), num_tokens)


def divide_budget(
    state: SchedulerState, most: dict[RequestOwner, int]
) -> dict[RequestOwner, int] | None:
    """The most tokens that each owner's running requests may compute in this step; None if all
    requests together, waiting ones included, want no more than the budget. `most`: the result of
    divide_background, which bounds waiting requests, too.
    """
    owners, budget = state.waiting.owners.values(), state.limits.max_num_batched_tokens
    shares = dict.fromkeys(owners, budget) | most if most else None
    if len(owners) < 2 or not state.limits.enable_chunked_prefill:
        return shares
    wanted = count_wanted(state, owners, len(state.free_slots))
    for owner in most:
        wanted[owner] = min(wanted[owner], most[owner])
    return shares if sum(wanted.values()) <= budget else divide(wanted, budget)


def count_wanted(
    state: SchedulerState, owners: Collection[RequestOwner], num_slots: int
) -> dict[RequestOwner, int]:
    """The tokens that each owner's requests can compute in this step, if `num_slots` of those that
    wait start. More than the budget are not counted.
    """
    wanted, limits = dict.fromkeys(owners, 0), state.limits
    for request in state.running:
        if request.owner in wanted:
            num_known = request.num_tokens + request.num_pending_tokens
            num_tokens = num_known - request.num_computed_tokens
            wanted[request.owner] += min(num_tokens, limits.max_chunk_tokens)
    for owner in wanted:
        for request in islice(owner.waiting, num_slots):
            if wanted[owner] >= limits.max_num_batched_tokens:
                break
            if state.lora_slots.can_use(request.adapter):
                wanted[owner] += min(request.num_tokens, limits.max_chunk_tokens)
    return wanted


def divide(wanted: dict[RequestOwner, int], budget: int) -> dict[RequestOwner, int]:
    """Max-min fair shares: what an owner does not want is divided among the others. Where there are
    fewer tokens than owners, these take turns.
    """
    shares, weight = {}, sum(owner.weight for owner in wanted)
    owners = sorted(wanted, key=lambda owner: owner.served)
    if budget >= len(owners):
        owners.sort(key=lambda owner: wanted[owner] / owner.weight)
    for owner in owners:
        share = max(min(1, budget), int(budget * owner.weight / weight))
        shares[owner] = min(wanted[owner], share)
        budget -= shares[owner]
        weight -= owner.weight
    return shares


def preempt_for_others(
    state: SchedulerState, paused: Collection[RequestOwner] = ()
) -> list[Request]:
    """Preempts requests so that those whose turn it is can start in this step, if their owner has
    less than its share; returns the preempted ones. Requests of `paused` owners do not start.

    An owner without a running request may always have one. The head of `running` is not preempted,
    nor is the last running request of an owner.
    """
    queue, manager, preempted = state.waiting, state.kv_cache_manager, []
    first = queue.next({owner: len(owner.waiting) for owner in paused})
    if first is None:
        return preempted
    owner, holdings = first.owner, Holdings(state)
    served = [
        other.served for other in queue.owners.values() if other.waiting and other not in paused
    ]
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
