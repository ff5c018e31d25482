"""A step while it is scheduled and runs: its rows, their requests, and the tokens expected from it.

Must not know: who is chosen for a step, torch, sockets.

A step may be scheduled while previous ones run. The tokens that these sample are
then pending: counted in `num_pending_tokens`, and not yet in `token_ids`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...ipc.step_messages import SchedulerOutput
from ..request import Request

if TYPE_CHECKING:
    from .scheduler import Scheduler


@dataclass(slots=True)
class ScheduledStep:
    """A step in the executor: its SchedulerOutput, and the requests of its rows.

    The lists are parallel with `output.slots`.
    """

    output: SchedulerOutput
    requests: list[Request] = field(default_factory=list)
    # tokens that the row samples unless it fails
    num_expected: list[int] = field(default_factory=list)
    # of the request's tokens, after the step
    num_computed: list[int] = field(default_factory=list)
    # rows that compute a prompt, or recompute a preempted request; their tokens
    prefills: list[tuple[Request, int]] = field(default_factory=list)
    # its begin and end, by time.monotonic(), and preemptions; observation.py writes it
    scheduling: tuple[float, float, int] = (0.0, 0.0, 0)
    stopped_by: str = ""  # why the head of the queue waits: schedule_waiting, or "preemption"
    execute_time: float = 0.0  # its execution began; only for steps with prefills


def most_samples(scheduler: Scheduler, num_requests: int) -> int:
    """How many of `num_requests` may sample a token in a step, so that the steps in flight have
    equally many: all, unless the model has stages. Requests with a pending token count, too.
    """
    even = -(-min(num_requests, scheduler.max_num_seqs) // scheduler.num_stages)
    return max(even, scheduler.least_samples)


def add_row(
    scheduler: Scheduler,
    step: ScheduledStep,
    request: Request,
    num_tokens: int,
    num_lookahead: int,
    block_ids: list[int],
) -> None:
    computed, output = request.num_computed_tokens, step.output
    step.requests.append(request)
    assert request.slot is not None  # it is running
    output.slots.append(request.slot)
    output.num_scheduled_tokens.append(num_tokens)
    output.num_computed_tokens.append(computed)
    output.new_block_ids.append(block_ids)
    if scheduler.num_lookahead_slots:
        output.num_lookahead_tokens.append(num_lookahead)
    end = computed + num_tokens
    num_expected = (
        1 + num_lookahead if end == len(request.token_ids) + request.num_pending_tokens else 0
    )
    request.num_pending_tokens += num_expected
    request.num_computed_tokens = end = end + num_lookahead
    step.num_expected.append(num_expected)
    step.num_computed.append(end)
    if len(scheduler.waiting.owners) > 1:
        scheduler.waiting.charge(request, num_tokens + num_lookahead)
    if computed < request.num_prompt_tokens or computed < request.num_computed_before_preemption:
        step.prefills.append((request, num_tokens))
        scheduler.counters.num_prompt_tokens += min(
            num_tokens, max(0, request.num_prompt_tokens - computed)
        )
        num_recomputed_tokens = min(
            num_tokens, max(0, request.num_computed_before_preemption - computed)
        )
        request.num_recomputed_tokens += num_recomputed_tokens
        scheduler.counters.num_recomputed_tokens += num_recomputed_tokens
