"""Applies the output of a step: tokens are appended, requests end, rows are written.

Must not know: who is scheduled next, torch, sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from itertools import repeat

from ...ipc.errors import InvalidParameterError
from ...ipc.messages import FinishReason
from ...ipc.step_messages import (
    ModelRunnerOutput,
    RowError,
    RowRefusal,
    SlotLogprobs,
    SlotPooled,
    SlotPromptLogprobs,
)
from ..output_rows import OutputRows
from ..request import Request, RequestStatus
from .state import SchedulerState
from .step import ScheduledStep

logger = logging.getLogger(__name__)

# The CPU time that the grammar of one request may take: at first, for each further completion, and
# for each token of its outputs. A token usually takes 10 to 100 us, and the first one of a large
# schema takes some milliseconds.
GRAMMAR_S, GRAMMAR_S_PER_COMPLETION, GRAMMAR_S_PER_TOKEN = 0.15, 0.01, 0.001


def update_from_output(
    state: SchedulerState, step: ScheduledStep, result: ModelRunnerOutput, rows: OutputRows
) -> None:
    """Takes the sampled tokens, ends requests with them, and writes the clients' rows."""
    rows.stamp()
    for request, num_tokens in step.prefills:
        request.note_prefill(step.output.step, step.execute_time, rows.now, num_tokens)
    logprobs = {entry.slot: entry for entry in result.logprobs}
    prompt_logprobs = {entry.slot: entry for entry in result.prompt_logprobs}
    pooled = {entry.slot: entry for entry in result.pooled}
    cursor, errors, running = 0, result.errors, RequestStatus.RUNNING
    ahead = count_ahead(state, step, result) if result.num_ahead else repeat((0, 0))
    if result.grammar_s:
        errors = spend_on_grammars(state, step, result.grammar_s) | errors
    for request, slot, num_sampled, num_expected, num_computed, num_preemptions, drafted in zip(
        step.requests,
        step.output.slots,
        result.num_sampled,
        step.num_expected,
        step.num_computed,
        step.num_preemptions,
        ahead,
    ):
        token_ids = result.token_ids[cursor : cursor + num_sampled]
        cursor += num_sampled
        request.num_pending_tokens -= num_expected
        is_running = request.status is running and request.num_preemptions == num_preemptions
        num_computed -= request.num_taken_back
        if result.num_ahead:
            num_computed += settle_drafts(state, request, num_expected - num_sampled, *drafted)
        if not is_running and request.is_finished:  # since the step was scheduled
            continue
        if slot in prompt_logprobs:
            write_prompt_logprobs(request, prompt_logprobs[slot], rows)
        reason = None
        if num_sampled:
            reason = append_tokens(state, request, token_ids, rows, logprobs.get(slot))
        if slot in pooled:
            reason = write_pooled(request, pooled[slot], rows)
        # An error counts after the tokens that were sampled. If one of them ended the request, the
        # failed ones were computed in vain.
        if slot in errors:
            if reason is None:
                fail(state, request, errors[slot], rows)
                continue
        elif is_running:  # else it was preempted while the step ran
            # tokens decoded after a stop are dropped, too
            state.kv_cache_manager.note_executed(request, min(num_computed, request.num_tokens))
        if reason is not None:
            state.finish(request, reason)


def count_ahead(
    state: SchedulerState, step: ScheduledStep, result: ModelRunnerOutput
) -> Iterable[tuple[int, int]]:
    """Counts drafts. For each row, how many tokens after the first sample the step counts as
    computed, and how many are.
    """
    state.counters.count_drafts(result.num_drafted, result.num_accepted)
    for count in result.num_accepted:
        for position in range(count):
            state.accepted_per_pos[position] += 1
    if state.limits.recomputes_drafts:
        return zip(repeat(0), result.num_ahead)
    return zip(step.output.num_lookahead_tokens, result.num_ahead)


def settle_drafts(
    state: SchedulerState, request: Request, num_missing: int, num_counted: int, num_ahead: int
) -> int:
    """Takes back what the request counts as computed although it is not. num_missing: tokens that
    the step may have sampled and has not. num_counted, num_ahead: see count_ahead.

    Returns what is added to the tokens that the step's row counts as computed.
    """
    num_surplus = num_counted - num_ahead
    if state.limits.recomputes_drafts and request.num_pending_tokens:
        num_surplus = num_missing  # a step in flight was to compute all, accepted ones and others
    if num_surplus:
        take_back(state, request, num_surplus)
    return num_ahead - num_counted


def take_back(state: SchedulerState, request: Request, num_surplus: int) -> None:
    """The last `num_surplus` tokens of the request do not count as computed any more."""
    if request.status is RequestStatus.RUNNING:
        request.num_computed_tokens -= num_surplus
        request.num_taken_back += num_surplus
        if (checkpoints := state.kv_cache_manager.checkpoints) is not None:
            checkpoints.take_back(request, request.num_computed_tokens)
    elif request.num_swapped_tokens:  # swapped out while the step ran
        request.num_swapped_tokens -= num_surplus
        state.kv_cache_manager.trim_host_blocks(request, request.num_swapped_tokens)


def spend_on_grammars(
    state: SchedulerState, step: ScheduledStep, grammar_s: dict[int, float]
) -> dict[int, RowError]:
    """Charges the CPU time of grammars, slot -> seconds, to requests and their owners. Returns the
    errors of those that have taken too much, by slot.
    """
    constrained = [
        (request, slot)
        for request, slot in zip(step.requests, step.output.slots)
        if request.grammar_s is not None
    ]
    for request, slot in constrained:
        if seconds := grammar_s.get(slot, 0.0):
            request.grammar_s = (request.grammar_s or 0.0) + seconds
            state.waiting.charge_time(request, seconds)
    refusals: dict[str, RowRefusal | None] = {}  # by message: completions have a common allowance
    errors: dict[int, RowError] = {}
    for request, slot in constrained:
        members = [request] if request.family is None else [*request.family.members.values()]
        name = request.request_id if request.family is None else request.family.request_id
        if name not in refusals:
            refusals[name] = grammar_refusal(members)
        if (refusal := refusals[name]) is not None:
            errors[slot] = refusal
    return errors


def grammar_refusal(completions: list[Request]) -> RowRefusal | None:
    """Why a message may not continue, or None if it may. completions: its unfinished ones."""
    spent_s = sum(request.grammar_s or 0.0 for request in completions)
    num_tokens = sum(request.num_output_tokens for request in completions)
    allowed_s = GRAMMAR_S + GRAMMAR_S_PER_COMPLETION * (len(completions) - 1)
    allowed_s += GRAMMAR_S_PER_TOKEN * num_tokens
    if spent_s <= allowed_s:
        return None
    return RowRefusal(
        "structured_outputs",
        f"is too complex: finding the tokens that may come next took {spent_s:.2f} s for "
        f"{num_tokens} tokens, {allowed_s:.2f} s are allowed",
    )


def append_tokens(
    state: SchedulerState,
    request: Request,
    token_ids: list[int],
    rows: OutputRows,
    logprobs: SlotLogprobs | None,
) -> FinishReason | None:
    """Appends the row's tokens up to the request's end; returns why it ends, or None. Writes
    its row.
    """
    first_index = len(request.token_ids) - request.num_prompt_tokens
    reason = None
    for count, token_id in enumerate(token_ids, start=1):
        reason = request.append_output_token(token_id)
        if reason is not None:
            token_ids = token_ids[:count]
            break
    state.counters.num_generation_tokens += len(token_ids)
    client_rows = rows.of(request.client_index)
    client_rows.add(request.request_id, first_index, token_ids)
    if first_index == request.num_resumed_tokens and request.first_token_time == 0.0:
        request.first_token_time = rows.now
        client_rows.add_num_cached_tokens(request.num_cached_tokens or 0)
    if logprobs is not None:
        client_rows.add_logprobs(logprobs, len(token_ids))
    if reason is not None:
        client_rows.finish(reason, request.stop_reason)
    # after its first token, after the first that follows a preemption, and after its last
    if first_index == request.report_index or reason is not None:
        client_rows.add_timing(request, rows.now)
    return reason


def write_prompt_logprobs(request: Request, logprobs: SlotPromptLogprobs, rows: OutputRows) -> None:
    """Writes a row without a token."""
    client_rows = rows.of(request.client_index)
    client_rows.add(request.request_id, request.num_output_tokens, [])
    client_rows.add_prompt_logprobs(logprobs)


def write_pooled(request: Request, pooled: SlotPooled, rows: OutputRows) -> FinishReason:
    """Writes the row of a request that pools, and returns why it ends."""
    client_rows = rows.of(request.client_index)
    client_rows.add(request.request_id, 0, [])
    client_rows.add_pooled(pooled)
    client_rows.add_num_cached_tokens(request.num_cached_tokens or 0)
    client_rows.finish(FinishReason.STOP)
    request.first_token_time = rows.now
    client_rows.add_timing(request, rows.now)
    return FinishReason.STOP


def fail(state: SchedulerState, request: Request, error: RowError, rows: OutputRows) -> None:
    parameter = error.parameter if isinstance(error, RowRefusal) else None
    state.finish(request, FinishReason.ERROR)
    write_end(request, FinishReason.ERROR, rows, rows.now, str(error), parameter)


def fail_requests(
    state: SchedulerState, requests: Iterable[Request], error: BaseException, rows: OutputRows
) -> None:
    """Ends requests between two steps. An error that names no parameter is the engine's own."""
    parameter = error.parameter if isinstance(error, InvalidParameterError) else None
    for request in requests:
        state.finish(request, FinishReason.ERROR)
        write_end(request, FinishReason.ERROR, rows, time.monotonic(), str(error), parameter)


def end_late_requests(state: SchedulerState, rows: OutputRows) -> None:
    """Ends the requests whose deadline has passed. Called between steps."""
    while state.has_late_requests():
        request = state.pop_late_request()
        state.finish(request, FinishReason.TIMEOUT)
        write_end(request, FinishReason.TIMEOUT, rows, time.monotonic())


def write_end(
    request: Request,
    reason: FinishReason,
    rows: OutputRows,
    now: float,
    error: str | None = None,
    parameter: str | None = None,
) -> None:
    """Writes the row of a request that ends without a token."""
    if error is not None and parameter is None:  # the fault is the engine's
        logger.error("the request %s failed: %s", request.request_id, error)
    client_rows = rows.of(request.client_index)
    client_rows.add(request.request_id, request.num_output_tokens, [])
    client_rows.finish(reason, error=error, parameter=parameter)
    client_rows.add_timing(request, now)
