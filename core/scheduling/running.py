"""The first half of a step: tokens for requests that already run.

Must not know: requests that wait, except whether there are any; how a token is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...ipc.models.kv_layout import MAX_BURST, lookahead_of
from ..request import Request
from .owners import Owner
from .step import ScheduledStep, add_row, most_samples

if TYPE_CHECKING:
    from .scheduler import Scheduler

# For num_scheduler_steps=0 the scheduler chooses how many tokens a step decodes. They share a
# step's cost outside the model, and requests that arrive meanwhile wait for all of them. This many
# bytes of weights, read once per token, take about 8 ms. The number is fixed, not measured, so that
# results are deterministic.
MAX_BURST_BYTES = 320 * 10**6


def schedule_running(
    scheduler: Scheduler, step: ScheduledStep, shares: dict[Owner, int] | None
) -> tuple[int, bool]:
    """Gives every running request its tokens, in order, preempting others for blocks.

    `shares`: see divide_budget; None: the budget is not divided. Returns (budget left, whether any
    was preempted).
    """
    budget, preempted = scheduler.max_num_batched_tokens, False
    has_stages = scheduler.num_stages > 1
    num_samples_left = most_samples(scheduler, len(scheduler.running))
    if scheduler.burst_weights_bytes or scheduler.num_drafting_passes > 1:
        num_passes = burst_length(scheduler)
        scheduler.num_lookahead_slots = lookahead_of(num_passes, scheduler.num_tokens_per_pass)
        if scheduler.drafts and num_passes > 1:
            step.output = msgspec.structs.replace(step.output, num_passes=num_passes)
    running, allocate_slots = scheduler.running, scheduler.kv_cache_manager.allocate_slots
    index = 0
    while index < len(running) and budget > 0:
        request = running[index]
        num_pending = request.num_pending_tokens
        # its last token is being sampled, or nobody knows how many drafts will be accepted, or the
        # first stage would have to wait for the token
        if num_pending and (request.num_tokens_left <= 0 or scheduler.drafts or has_stages):
            index += 1
            continue
        num_tokens = len(request.token_ids) + num_pending - request.num_computed_tokens
        if num_tokens > 1:
            num_tokens = min(num_tokens, scheduler.max_chunk_tokens, budget)
        if shares is not None:
            num_tokens = min(num_tokens, shares[request.owner])
            if not num_tokens:
                index += 1
                continue
        if has_stages and request.num_computed_tokens + num_tokens == request.num_tokens:
            if num_samples_left <= 0:
                index += 1
                continue
        num_lookahead = (
            num_lookahead_of(scheduler, request, num_tokens) if scheduler.num_lookahead_slots else 0
        )
        block_ids = allocate_slots(request, num_tokens + num_lookahead)
        # no preemption for what can be done one step later
        if block_ids is None and num_lookahead:
            num_lookahead = 0
            block_ids = allocate_slots(request, num_tokens)
        if block_ids is None:
            # possibly `request`; if not, it tries again
            scheduler.preempt(running.pop(scheduler.preemption.choose_victim(running, index)))
            preempted = True
            continue
        add_row(scheduler, step, request, num_tokens, num_lookahead, block_ids)
        num_samples_left -= step.num_expected[-1] > 0
        budget -= num_tokens
        if shares is not None:
            shares[request.owner] -= num_tokens
        index += 1
    return budget, preempted


def burst_length(scheduler: Scheduler) -> int:
    """Passes of the model that the next step may take, each for a token of each request or more.

    More than one if no request waits, none has a prompt to compute, all can have as many, and it
    takes little time, or so many are wanted. Where a grammar forces tokens, they come without the
    model, and no lookahead follows.
    """
    length = scheduler.num_drafting_passes
    if scheduler.burst_weights_bytes:
        weights_bytes = scheduler.burst_weights_bytes * max(1, len(scheduler.running))
        length = min(MAX_BURST, MAX_BURST_BYTES // weights_bytes)
    if scheduler.waiting or length < 2:
        return 1
    for request in scheduler.running:
        decodes = request.num_prompt_tokens < request.num_tokens == request.num_computed_tokens + 1
        if not decodes or request.grammar_s is not None:
            return 1
        length = min(length, request.num_tokens_left)
    return length


def num_lookahead_of(scheduler: Scheduler, request: Request, num_tokens: int) -> int:
    """Tokens to decode after the row's first sample, if `num_tokens` are all that remain to
    compute.
    """
    if request.num_computed_tokens + num_tokens < request.num_tokens + request.num_pending_tokens:
        return 0
    return min(scheduler.num_lookahead_slots, request.num_tokens_left - 1)
