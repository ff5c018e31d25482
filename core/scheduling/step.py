"""A step and how it is filled: tokens for requests that run, then for requests that wait.

Must not know: how a token is computed, torch, sockets.

A step may be scheduled while previous ones run. The tokens that these sample are then pending:
counted in `num_pending_tokens`, and not yet in `token_ids`. Where a model drafts, as many as can be
are counted, and what was too much is taken back (results.py).
"""

from __future__ import annotations

import heapq
import sys
import time
from bisect import bisect_right, insort
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import attrgetter

from msgspec.structs import replace

from ...ipc.models.kv_layout import MAX_BURST, lookahead_of
from ...ipc.step_messages import NewRequestData, SchedulerOutput
from ..forks import Family
from ..request import Request, RequestOwner, RequestStatus
from .admission import StartPoint, find_start, has_room, num_missing_blocks
from .images import places_of
from .state import SchedulerState

_by_key = attrgetter("key")

# For num_scheduler_steps=0 the scheduler chooses how many tokens a step decodes. They share a
# step's cost outside the model, and requests that arrive meanwhile wait for all of them. This many
# bytes of weights, read once per token, take about 8 ms. The number is fixed, not measured, so that
# results are deterministic.
MAX_BURST_BYTES = 320 * 10**6


@dataclass(slots=True)
class ScheduledStep:
    """A step in the executor: its SchedulerOutput, and the requests of its rows.

    The lists are parallel with `output.slots`.
    """

    output: SchedulerOutput
    max_lookahead: int = 0  # tokens that a row may decode after its first sample
    bounds: RowBounds | None = None  # None: only the budget bounds the rows
    requests: list[Request] = field(default_factory=list)
    # tokens that the row samples unless it fails
    num_expected: list[int] = field(default_factory=list)
    # how many of the request's tokens are computed after the step
    num_computed: list[int] = field(default_factory=list)
    # how often the request had been preempted: where the model has stages, it may start again
    # before this step has run
    num_preemptions: list[int] = field(default_factory=list)
    # rows that compute a prompt, or recompute a preempted request, with the number of their tokens
    prefills: list[tuple[Request, int]] = field(default_factory=list)
    # when its scheduling began and ended, by time.monotonic(), and the number of preemptions;
    # observation.py writes it
    scheduling: tuple[float, float, int] = (0.0, 0.0, 0)
    stopped_by: str = ""  # why the head of the queue waits: see admit_waiting, or "preemption"
    execute_time: float = 0.0  # when its execution began; set when it has run


def most_samples(state: SchedulerState, num_requests: int) -> int:
    """How many of `num_requests` may sample a token in a step where the model has stages, so that
    the steps in flight have equally many. Requests with a pending token count, too.
    """
    limits = state.limits
    even = -(-min(num_requests, limits.max_num_seqs) // limits.num_stages)
    return max(even, limits.least_samples)


def choose_num_passes(state: SchedulerState, shares: dict[RequestOwner, int] | None = None) -> int:
    """Passes of the model that the next step may take, each for a token of each request or more.

    As many as are configured, if they are. Else, and where a model drafts, more than one if no
    request waits, none has a prompt to compute, all can have as many, and it takes little time.
    Where a grammar forces tokens, they come without the model, and no lookahead follows. With
    `shares` (see begin_step), requests in the background do not matter beside others.
    """
    limits, length = state.limits, state.limits.num_scheduler_steps
    waits, running = _in_foreground(state) if shares else (bool(state.waiting), state.running)
    if limits.burst_weights_bytes:
        weights_bytes = limits.burst_weights_bytes * max(1, len(running))
        length = min(MAX_BURST, MAX_BURST_BYTES // weights_bytes)
    elif not limits.drafts:
        return max(1, length)
    if waits or length < 2:
        return 1
    for request in running:
        num_computed = request.num_computed_tokens - request.num_pending_tokens
        decodes = request.num_prompt_tokens < request.num_tokens == num_computed + 1
        if not decodes or request.grammar_s is not None:
            return 1
        length = min(length, request.num_tokens_left)
    return length


def _in_foreground(state: SchedulerState) -> tuple[bool, list[Request]]:
    """Whether any waits, and those that run: of all requests if none in the foreground runs."""
    running = [request for request in state.running if not request.owner.is_background]
    if not running:
        return bool(state.waiting), state.running
    owners = state.waiting.owners.values()
    return any(owner.waiting for owner in owners if not owner.is_background), running


def begin_step(state: SchedulerState, shares: dict[RequestOwner, int] | None) -> ScheduledStep:
    """A step without rows. shares: see divide_budget; None: the budget is not divided."""
    num_passes, output = choose_num_passes(state, shares), state.next_output
    if state.limits.drafts:
        output = replace(output, num_passes=num_passes)  # it has the same lists
    max_lookahead = lookahead_of(num_passes, state.limits.num_tokens_per_pass)
    return ScheduledStep(output, max_lookahead, RowBounds.of(state, shares))


def add_row(
    state: SchedulerState,
    step: ScheduledStep,
    request: Request,
    num_tokens: int,
    num_lookahead: int,
    block_ids: list[int],
) -> None:
    computed, output = request.num_computed_tokens, step.output
    step.requests.append(request)
    assert request.slot is not None  # it is running
    if step.bounds is not None:
        step.bounds.take(step, request, num_tokens, num_lookahead)
    output.slots.append(request.slot)
    output.num_scheduled_tokens.append(num_tokens)
    output.num_computed_tokens.append(computed)
    output.new_block_ids.append(block_ids)
    if step.max_lookahead:
        output.num_lookahead_tokens.append(num_lookahead)
    end = computed + num_tokens
    is_sampled = end == len(request.token_ids) + request.num_pending_tokens
    num_expected = 1 + num_lookahead if is_sampled else 0
    request.num_pending_tokens += num_expected
    request.num_computed_tokens = end + num_lookahead * (not state.limits.recomputes_drafts)
    step.num_expected.append(num_expected)
    step.num_computed.append(request.num_computed_tokens + request.num_taken_back)
    step.num_preemptions.append(request.num_preemptions)
    if len(state.waiting.owners) > 1:
        state.waiting.charge(request, num_tokens + num_lookahead)
    if computed < request.num_prompt_tokens or computed < request.num_computed_before_preemption:
        step.prefills.append((request, num_tokens))
        num_prompt = min(num_tokens, max(0, request.num_prompt_tokens - computed))
        num_again = min(num_tokens, max(0, request.num_computed_before_preemption - computed))
        state.counters.num_prompt_tokens += num_prompt
        state.counters.num_recomputed_tokens += num_again
        request.num_recomputed_tokens += num_again


# -------------------------------------------------------------------- requests that run


def schedule_running(state: SchedulerState, step: ScheduledStep) -> tuple[int, bool]:
    """Gives every running request its tokens, in order, preempting others for blocks. Returns
    (budget left, whether any was preempted).
    """
    limits, budget, preempted = state.limits, state.limits.max_num_batched_tokens, False
    has_stages = limits.num_stages > 1
    running, allocate_slots = state.running, state.kv_cache_manager.allocate_slots
    index = 0
    while index < len(running) and budget > 0:
        request = running[index]
        num_pending = request.num_pending_tokens
        num_left = num_tokens = len(request.token_ids) + num_pending - request.num_computed_tokens
        if num_tokens > 1:
            num_tokens = min(num_tokens, limits.max_chunk_tokens, budget)
        # its last token is being sampled, or the first stage would have to wait for the token
        if num_pending and (request.num_tokens_left <= 0 or has_stages):
            num_tokens = 0
        if step.bounds is not None:
            first = request.num_computed_tokens
            num_tokens = step.bounds.apply(request, first, num_tokens, budget)
        # how many tokens pending drafts give is not known, so that no part of them is computed
        if not num_tokens or (num_pending and num_tokens < num_left):
            index += 1
            continue
        num_lookahead = lookahead_for(step, request, num_tokens) if step.max_lookahead else 0
        block_ids = allocate_slots(request, num_tokens + num_lookahead)
        # no preemption for what can be done one step later
        if block_ids is None and num_lookahead:
            num_lookahead = 0
            block_ids = allocate_slots(request, num_tokens)
        if block_ids is None:
            # possibly `request`; if not, it tries again
            state.preempt(running.pop(state.preemption.choose_victim(running, index)))
            preempted = True
            continue
        add_row(state, step, request, num_tokens, num_lookahead, block_ids)
        budget -= num_tokens
        index += 1
    return budget, preempted


class RowBounds:
    """What bounds the rows of a step beside the budget, and what they take of it: the shares of
    owners; where the model keeps states, their checkpoints; where it reads images, those that are
    encoded; and where it has stages, how many requests may sample a token.
    """

    def __init__(self, state: SchedulerState, shares: dict[RequestOwner, int] | None):
        """shares: see divide_budget. They are counted down."""
        self._state, self._shares = state, shares
        self._num_samples_left = self._num_samples = sys.maxsize
        if state.limits.num_stages > 1:
            self._num_samples_left = most_samples(state, len(state.running))
            self._num_samples = most_samples(state, len(state.running) + len(state.waiting))
        if state.images is not None:
            state.images.begin_step(state.num_steps)

    @classmethod
    def of(cls, state: SchedulerState, shares: dict[RequestOwner, int] | None) -> RowBounds | None:
        """None: only the budget bounds the rows."""
        is_bounded = shares is not None or state.limits.num_stages > 1
        is_bounded |= state.images is not None or state.kv_cache_manager.checkpoints is not None
        return cls(state, shares) if is_bounded else None

    def begin_waiting(self, num_sampled: int) -> dict[RequestOwner, int]:
        """The next rows are of waiting requests, which shares bound in the background only.
        `num_sampled`: how many rows of the step sample a token.

        Returns how many requests of the owners that have used up their share are passed over.
        """
        self._num_samples_left = self._num_samples - num_sampled
        shares = self._shares or {}
        self._shares = {owner: left for owner, left in shares.items() if owner.is_background}
        return {owner: len(owner.waiting) for owner, left in self._shares.items() if left <= 0}

    def apply(
        self, request: Request, first: int, num_tokens: int, budget: int, num_shared: int = 0
    ) -> int:
        """How many of `num_tokens` tokens after the first `first` the request may compute in this
        step, of which `budget` tokens are left. num_shared: see StartPoint.
        """
        state = self._state
        if self._shares is not None:
            # a whole image, or a prompt that cannot be split, may take more than the share
            left = max(0, self._shares.get(request.owner, num_tokens))
            if not left or state.limits.enable_chunked_prefill:
                num_tokens = min(num_tokens, left)
        if state.fit_to_checkpoints is not None and num_tokens > 1:
            num_tokens = state.fit_to_checkpoints(request, first, num_tokens, num_shared)
        if state.images is not None and num_tokens > 0 and request.images:
            num_tokens = state.images.fit(request, first, num_tokens, budget)
        is_sampled = first + num_tokens == request.num_tokens
        return 0 if is_sampled and self._num_samples_left <= 0 else num_tokens

    def take(
        self, step: ScheduledStep, request: Request, num_tokens: int, num_lookahead: int
    ) -> None:
        """The running request is about to get this row."""
        first, output, state = request.num_computed_tokens, step.output, self._state
        end = first + num_tokens
        self._num_samples_left -= end == request.num_tokens
        if self._shares is not None and request.owner in self._shares:
            self._shares[request.owner] -= num_tokens
        if state.images is not None and request.images:
            state.images.place(output, request, first, num_tokens)
        if (checkpoints := state.kv_cache_manager.checkpoints) is not None:
            assert request.slot is not None  # it is running
            # drafts may be rejected, so that the state stays before them
            last = end if state.limits.drafts else end + num_lookahead
            if (save := checkpoints.take(request, first, last)) is not None:
                output.state_saves.append((request.slot, save[0] - 1, save[1]))


def lookahead_for(step: ScheduledStep, request: Request, num_tokens: int) -> int:
    """Tokens to decode after the row's first sample, if `num_tokens` are all that remain to
    compute.
    """
    if request.num_computed_tokens + num_tokens < request.num_tokens + request.num_pending_tokens:
        return 0
    return min(step.max_lookahead, request.num_tokens_left - 1)


# -------------------------------------------------------------------- requests that wait


def admit_waiting(
    state: SchedulerState, step: ScheduledStep, budget: int, made_room: Collection[Request]
) -> str:
    """Admits the request whose turn it is while there are budget, slots and blocks.

    No request overtakes one that does not fit. Passed over are those that wait for a sibling's
    prompt, for an adapter, or in the background. Those in `made_room` were preempted in this step.
    Returns what the first lacks, "budget", "slots", "blocks" or "adapter", or "preemption" if it is
    one of these, or was preempted while a step samples its token; "" if none waits for these.
    """
    manager, limits, bounds, reason = state.kv_cache_manager, state.limits, step.bounds, ""
    num_reserved: int | None = None
    # requests in the background, and those that wait for a sibling or an adapter
    passed = {} if bounds is None else bounds.begin_waiting(sum(map(bool, step.num_expected)))
    while (request := state.waiting.next(passed)) is not None:
        if budget <= 0 or not state.free_slots:
            return "budget" if budget <= 0 else "slots"
        if request in made_room or request.num_pending_tokens:
            return "preemption"
        if request.adapter is not None and not state.lora_slots.may_start(request.adapter):
            passed[request.owner] = passed.get(request.owner, 0) + 1
            reason = "adapter"
            continue
        start = find_start(manager, request)
        if start is None:
            _pass_family(state, request, passed)
            continue
        num_tokens = min(request.num_tokens - start.num_tokens, limits.max_chunk_tokens)
        if num_tokens > budget and not limits.enable_chunked_prefill:
            return "budget"
        num_tokens = min(num_tokens, budget)
        if bounds is not None:
            num_tokens = bounds.apply(
                request, start.num_tokens, num_tokens, budget, start.num_shared
            )
        if not num_tokens:
            return "budget"
        if num_reserved is None:
            num_reserved = sum(num_missing_blocks(manager.layout, one) for one in state.running)
        if not has_room(manager, num_reserved, request, start):
            return "blocks"
        block_ids = manager.begin(request, num_tokens, start.blocks, start.num_tokens)
        if block_ids is None:
            return "blocks"
        if start.missing or start.loaded_state is not None:
            start = _load(state, step, request, start)
            if start is None:
                continue  # it starts without what could not be loaded
        state.waiting.start(request)
        _admit(state, step, request, start, block_ids)
        add_row(state, step, request, num_tokens, 0, block_ids)
        budget -= num_tokens
        num_reserved += num_missing_blocks(manager.layout, request)
    return reason


def _load(
    state: SchedulerState, step: ScheduledStep, request: Request, start: StartPoint
) -> StartPoint | None:
    """Loads the blocks and the checkpoint from which the request is to start. None: the request has
    not begun, and starts without them.
    """
    manager = state.kv_cache_manager
    if start.missing and not manager.load(request, start.missing):
        return None
    if start.loaded_state is None:
        return start
    assert manager.checkpoints is not None
    busy = {source for source, _ in step.output.state_copies}
    checkpoint = manager.checkpoints.load(start.loaded_state, start.num_tokens, busy)
    if checkpoint is None:
        assert manager.offload is not None
        manager.offload.suspend()
        manager.free(request)
        return None
    return start._replace(checkpoint=checkpoint)


def admit_with_adapters(
    state: SchedulerState, step: ScheduledStep, budget: int, made_room: Collection[Request]
) -> str:
    """Does what admit_waiting does, where requests may have adapters."""
    lora_slots = state.lora_slots
    if lora_slots.is_stuck:
        return "adapter"
    lora_slots.begin_pass()
    reason = admit_waiting(state, step, budget, made_room)
    # a request that waits for a sibling may start without a change here
    is_stuck = reason == "adapter" and not (step.output.new_requests or lora_slots.has_siblings)
    lora_slots.end_pass(is_stuck=is_stuck)
    return reason


def _pass_family(state: SchedulerState, request: Request, passed: dict[RequestOwner, int]) -> None:
    """None of its family may start before the prompt is computed."""
    assert request.family is not None
    state.lora_slots.note_sibling()
    waiting, last_key = request.owner.waiting, request.family.last_key
    passed[request.owner] = bisect_right(waiting, last_key, key=_by_key)


def _admit(
    state: SchedulerState,
    step: ScheduledStep,
    request: Request,
    start: StartPoint,
    block_ids: list[int],
) -> None:
    if start.source is not None:
        _copy_partial_blocks(state, step, start, block_ids)
    request.slot = heapq.heappop(state.free_slots)
    if state.kv_cache_manager.checkpoints is not None:
        _restore_state(state, step, request, request.slot, start)
    if request.num_swapped_tokens:
        _swap_in(state, step, request, len(start.blocks[0]))
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = start.num_tokens
    insort(state.running, request, key=_by_key)
    if request.adapter is not None:
        state.lora_slots.start(request.adapter, state.num_steps)
    if request.family is not None:
        request.family.note_start(request)
        _share_checkpoint(state, request, request.family, start)
    if request.num_cached_tokens is None:  # else it was preempted
        _note_first_start(state, request, start)
    step.output.new_requests.append(
        NewRequestData(
            slot=request.slot,
            request_id=request.request_id,
            token_ids=request.token_ids.copy()  # the runner's copy grows by itself
            if state.images is None
            else state.images.tokens_of(request),
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            eos_token_ids=request.eos_token_ids,
            lora_request=None if request.adapter is None else request.adapter.numbered(),
            cache_salt=request.cache_salt,
            images=places_of(request) if request.images else [],
        )
    )


def _restore_state(
    state: SchedulerState, step: ScheduledStep, request: Request, slot: int, start: StartPoint
) -> None:
    """Has the state copied with which the request continues."""
    checkpoints = state.kv_cache_manager.checkpoints
    assert checkpoints is not None
    place, kept = checkpoints.unpark(request), start.num_tokens
    if place is not None:  # it was swapped out, between two checkpoints
        num_blocks = start.num_tokens // state.kv_cache_manager.block_size
        before = checkpoints.find(request.block_hashes[:num_blocks])
        kept = 0 if before is None else before.num_tokens
    elif start.checkpoint is not None:
        place = start.checkpoint.place
        checkpoints.use(start.checkpoint)
    if place is not None:
        step.output.state_copies.append((place, slot))
    checkpoints.begin(request, kept, start.num_shared)


def _share_checkpoint(
    state: SchedulerState, request: Request, family: Family, start: StartPoint
) -> None:
    """The other members may start where the first one has started, at least."""
    checkpoints = state.kv_cache_manager.checkpoints
    if checkpoints is None:
        return
    if not family.has_unstarted:
        checkpoints.unshare(family)
    elif start.checkpoint is not None:
        checkpoints.share(request, start.checkpoint)


def _copy_partial_blocks(
    state: SchedulerState, step: ScheduledStep, start: StartPoint, block_ids: list[int]
) -> None:
    """Has the block of each group copied that another request holds, too, and that both fill."""
    assert start.source is not None
    num_in_group = len(block_ids) // len(start.source)
    copies = block_ids[len(start.blocks[0]) :: num_in_group]
    step.output.blocks_to_copy.extend(
        (source.block_id, copy) for source, copy in zip(start.source, copies, strict=True)
    )
    state.counters.num_blocks_copied += len(copies)


def _swap_in(
    state: SchedulerState, step: ScheduledStep, request: Request, num_computed_blocks: int
) -> None:
    pairs = state.kv_cache_manager.swap_in(request, num_computed_blocks)
    step.output.blocks_to_swap_in.extend(pairs)
    state.counters.num_blocks_swapped_in += len(pairs)
    request.num_swapped_tokens = 0


def _note_first_start(state: SchedulerState, request: Request, start: StartPoint) -> None:
    """Later hits are its own old blocks and say nothing about the cache."""
    request.scheduled_time = time.monotonic()
    request.num_cached_tokens = min(start.num_tokens, request.num_prompt_tokens)
    manager = state.kv_cache_manager
    if manager.enable_caching and request.reads_prefix_cache and not start.is_fork:
        num_loaded = len({index for index, _ in start.missing}) * manager.block_size
        num_hit = start.num_tokens - num_loaded
        state.counters.prefix_cache_queries += request.num_tokens
        state.counters.prefix_cache_hits += num_hit
        if manager.offload is not None:
            manager.offload.record_query(request.num_tokens - num_hit, num_loaded)
