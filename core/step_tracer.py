"""Records some steps: what the scheduler decided and why, and when; the executor adds its part.

Must not know: torch, sockets, who asked for the trace.

    begin ──▶ Scheduler.schedule ──▶ scheduled ──▶ the step runs ──▶ processed
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ..ipc.errors import InvalidParameterError
from ..ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ..ipc.trace import (
    MAX_STEPS,
    EngineTrace,
    RanksTrace,
    RankTrace,
    Row,
    StepTrace,
    Waiting,
    place_of_function,
)
from .request import Request
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from .engine_core import EngineCore

MAX_WAITING = 32  # requests whose reason is named


class _Scheduled(NamedTuple):
    """What a step's results change; the rest of the step is read when the trace is over."""

    output: SchedulerOutput
    requests: list[Request]
    num_known: list[int]
    num_blocks: list[int]  # taken
    cached: dict[int, int]  # of new requests, by slot
    waiting: list[Waiting]
    preempted: list[str]
    begin_s: float
    scheduled_s: float
    num_free_blocks: tuple[int, int]  # before and after


class _Processed(NamedTuple):
    scheduled: _Scheduled
    times: tuple[float, float, float, float]  # see `processed`
    finished: list[str]
    num_free_blocks: int
    num_tokens: int
    num_ahead: list[int]  # of each row


def check_num_steps(num_steps: int) -> None:
    """Raises InvalidParameterError."""
    if type(num_steps) is not int or not 1 <= num_steps <= MAX_STEPS:
        raise InvalidParameterError(
            "steps", f"must be between 1 and {MAX_STEPS}, got {num_steps!r}"
        )


class StepTracer:
    """Between `begin` and `processed` of each step; the first `num_steps` are recorded."""

    def __init__(self, core: EngineCore, client_index: int, num_steps: int):
        self._core = core
        self.client_index, self.num_steps = client_index, num_steps
        self.steps: list[_Processed] = []
        self._num_begun = 0
        self._waits: list[Future[int]] = []
        self._free_before = 0
        self._preempted: dict[str, int] = {}
        # of steps that run: what was known when they were scheduled
        self._scheduled: dict[int, _Scheduled] = {}
        if core.message_timer is not None:
            core.message_timer.start()

    def wait(self) -> Future[int]:
        """A future that `settle` completes with the number of recorded steps."""
        self._waits.append(Future())
        return self._waits[-1]

    def settle(self, *, is_over: bool = False) -> None:
        """Completes what waits for the trace, once it is complete or over."""
        if is_over or len(self.steps) == self.num_steps:
            waits, self._waits = self._waits, []
            for future in waits:
                future.set_result(len(self.steps))

    def result(self, ranks: RanksTrace) -> EngineTrace:
        """The whole trace, with what the executor has recorded."""
        core, config = self._core, self._core.config
        functions = core.step_fn, Scheduler.schedule, Scheduler.update_from_output
        places = {function.__qualname__: place_of_function(function) for function in functions}
        return EngineTrace(
            config.model_config.model,
            config.model_config.dtype,
            config.device_config.device,
            config.device_config.num_threads or 0,
            ranks.implementation,
            ranks.model_class,
            os.getpid(),
            [self._in_words(step, ranks.steps) for step in self.steps],
            ranks.limits,
            places | ranks.places,
            ranks.notes,
            [] if core.message_timer is None else core.message_timer.stop(),
        )

    def begin(self) -> None:
        """Called before a step is scheduled."""
        scheduler = self._core.scheduler
        self._free_before = scheduler.kv_cache_manager.num_free_blocks
        self._preempted = {
            request.request_id: request.num_preemptions for request in scheduler.running
        }

    def scheduled(self, step: ScheduledStep) -> None:
        """Called when a step has been scheduled, before it runs."""
        if self._num_begun == self.num_steps:
            return
        self._num_begun += 1
        scheduler, output, requests = self._core.scheduler, step.output, step.requests
        cached: dict[int, int] = {}
        if output.new_requests:
            new = {request.slot for request in output.new_requests}
            cached = {
                slot: request.num_cached_tokens or 0
                for request, slot in zip(requests, output.slots)
                if slot in new
            }
        preempted = [
            request_id
            for request_id, count in self._preempted.items()
            if scheduler.requests[request_id].num_preemptions > count
        ]
        self._scheduled[output.step] = _Scheduled(
            output,
            requests,
            [request.num_tokens for request in requests],
            list(map(len, output.new_block_ids)),
            cached,
            self._waiting(step),
            preempted,
            step.scheduling[0],
            step.scheduling[1],
            (self._free_before, scheduler.kv_cache_manager.num_free_blocks),
        )

    def _waiting(self, step: ScheduledStep) -> list[Waiting]:
        """The first requests of the queue, and why each waits."""
        core = self._core
        if not (core.scheduler.waiting or core.scheduler.held or core.gate):
            return []
        found, reason = [], step.stopped_by
        for request in islice(core.scheduler.waiting, MAX_WAITING):
            is_sibling = request.family is not None and request.family.first is not request
            why = "sibling" if is_sibling and not reason else reason or "order"
            found.append(Waiting(request.request_id, why, request.num_tokens, request.key[0]))
            reason = "order" if reason in ("budget", "blocks") else reason
        found += [
            Waiting(request_id, "pause", request.num_tokens, request.key[0])
            for request_id, request in core.scheduler.held.items()
        ]
        found += [
            Waiting(
                gated.request.request_id,
                "grammar",
                len(gated.request.prompt_token_ids),
                gated.request.priority,
            )
            for gated in core.gate
        ]
        return found[:MAX_WAITING]

    def processed(
        self,
        step: ScheduledStep,
        output: ModelRunnerOutput,
        times: tuple[float, float, float, float],
    ) -> None:
        """Called when a step's result has been applied. times: StepRecords.last_times."""
        record = self._scheduled.pop(step.output.step, None)
        if record is None:
            return
        self.steps.append(
            _Processed(
                record,
                times,
                [request.request_id for request in step.requests if request.is_finished],
                self._core.scheduler.kv_cache_manager.num_free_blocks,
                sum(output.num_sampled),
                output.num_ahead,
            )
        )

    def _in_words(self, step: _Processed, ranks: dict[int, list[RankTrace]]) -> StepTrace:
        known, output = step.scheduled, step.scheduled.output
        lookahead = output.num_lookahead_tokens or [0] * len(output.slots)
        rows = [
            Row(
                request.request_id,
                num_tokens,
                num_computed,
                num_lookahead,
                num_known,
                slot in known.cached,
                num_blocks,
                known.cached.get(slot, 0),
                num_ahead,
            )
            for (
                request,
                slot,
                num_tokens,
                num_computed,
                num_lookahead,
                num_known,
                num_blocks,
                num_ahead,
            ) in zip(
                known.requests,
                output.slots,
                output.num_scheduled_tokens,
                output.num_computed_tokens,
                lookahead,
                known.num_known,
                known.num_blocks,
                step.num_ahead or lookahead,
            )
        ]
        return StepTrace(
            output.step,
            known.begin_s,
            known.scheduled_s - known.begin_s,
            step.times[0],
            step.times[2],
            step.times[3],
            self._core.scheduler.max_num_batched_tokens,
            rows,
            known.waiting,
            known.preempted,
            step.finished,
            [*known.num_free_blocks, step.num_free_blocks],
            step.num_tokens,
            ranks.get(output.step, []),
        )
