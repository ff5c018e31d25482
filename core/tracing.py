"""Records some steps: what the scheduler decided and why, and when; the executor adds its part.

Must not know: torch, sockets, who asked for the trace.

    start_trace ──▶ begin ──▶ Scheduler.schedule ──▶ scheduled ──▶ the step runs ──▶ processed
                      └───────────────────────── num_steps times ─────────────────────────┘
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from typing import Any, NamedTuple, Protocol

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidParameterError
from ..ipc.hops import MessageTimer
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
from .arrivals import GrammarGate
from .request import Request
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep

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


class TracedRanks(Protocol):
    """See Executor."""

    def start_trace(self, num_steps: int) -> None: ...
    def end_trace(self) -> RanksTrace: ...


class Tracing:
    """One trace at a time, for the client that has started it."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        ranks: TracedRanks,
        gate: GrammarGate,
        step_fn: Callable[[], Any],
        message_timer: MessageTimer | None,
    ):
        """step_fn: what runs a step; a trace names its place in the code. message_timer: of a host
        with sockets.
        """
        self.recorder: StepRecorder | None = None  # while steps are traced
        self._config = config
        self._scheduler = scheduler
        self._ranks = ranks
        self._gate = gate
        self._step_fn = step_fn
        self._message_timer = message_timer
        self._client_index = -1  # of the one whose trace it is

    def is_used_by(self, client_index: int) -> bool:
        """Whether the client has a trace, which ends when it leaves."""
        return self.recorder is not None and self._client_index == client_index

    def start_trace(self, num_steps: int = 1, *, client_index: int = 0) -> None:
        """Records the next `num_steps` steps (ipc/trace.py), for this client, until `end_trace`."""
        if type(num_steps) is not int or not 1 <= num_steps <= MAX_STEPS:
            raise InvalidParameterError(
                "steps", f"must be between 1 and {MAX_STEPS}, got {num_steps!r}"
            )
        if self.recorder is not None:
            raise InvalidParameterError("trace", "is being recorded already: end it first")
        self._ranks.start_trace(num_steps)
        self._client_index = client_index
        self.recorder = StepRecorder(self._scheduler, self._gate, num_steps)
        if self._message_timer is not None:
            self._message_timer.start()

    def wait_for_trace(self) -> Future[int]:
        """Returns when all steps of the trace are recorded, or it has ended: their number."""
        if self.recorder is None:
            raise InvalidParameterError("trace", "is not being recorded: start it first")
        return self.recorder.wait()

    def end_trace(self, *, client_index: int = 0) -> EngineTrace:
        """Ends the trace that this client started; returns the steps that were recorded, which
        may be fewer than it asked for.
        """
        if self.recorder is None or self._client_index != client_index:
            raise InvalidParameterError("trace", "is not being recorded: start it first")
        recorder, self.recorder = self.recorder, None
        recorder.settle(is_over=True)
        return self._trace_of(recorder, self._ranks.end_trace())

    def _trace_of(self, recorder: StepRecorder, ranks: RanksTrace) -> EngineTrace:
        """The whole trace, with what the executor has recorded."""
        config = self._config
        functions = self._step_fn, Scheduler.schedule, Scheduler.update_from_output
        places = {function.__qualname__: place_of_function(function) for function in functions}
        return EngineTrace(
            config.model_config.model,
            config.model_config.dtype,
            config.device_config.device,
            config.device_config.num_threads or 0,
            ranks.implementation,
            ranks.model_class,
            os.getpid(),
            recorder.traces(ranks.steps),
            ranks.limits,
            places | ranks.places,
            ranks.notes,
            [] if self._message_timer is None else self._message_timer.stop(),
        )


class StepRecorder:
    """Records the first `num_steps` steps, each between `begin` and `processed`."""

    def __init__(self, scheduler: Scheduler, gate: GrammarGate, num_steps: int):
        self._scheduler = scheduler
        self._gate = gate
        self._num_steps = num_steps
        self._steps: list[_Processed] = []
        self._num_begun = 0
        self._waits: list[Future[int]] = []
        self._free_before = 0
        self._preempted: dict[str, int] = {}
        # of steps that run: what was known when they were scheduled
        self._scheduled: dict[int, _Scheduled] = {}

    def wait(self) -> Future[int]:
        """A future that `settle` completes with the number of recorded steps."""
        self._waits.append(Future())
        return self._waits[-1]

    def settle(self, *, is_over: bool = False) -> None:
        """Completes the futures of `wait` once the trace is complete or over."""
        if is_over or len(self._steps) == self._num_steps:
            waits, self._waits = self._waits, []
            for future in waits:
                future.set_result(len(self._steps))

    def traces(self, ranks: dict[int, list[RankTrace]]) -> list[StepTrace]:
        """The recorded steps. ranks: what the executor's ranks have recorded, by step number."""
        return [self._step_trace(step, ranks) for step in self._steps]

    def begin(self) -> None:
        """Called before a step is scheduled."""
        scheduler = self._scheduler
        self._free_before = scheduler.kv_cache_manager.num_free_blocks
        self._preempted = {
            request.request_id: request.num_preemptions for request in scheduler.running
        }

    def scheduled(self, step: ScheduledStep) -> None:
        """Called when a step has been scheduled, before it runs."""
        if self._num_begun == self._num_steps:
            return
        self._num_begun += 1
        scheduler, output, requests = self._scheduler, step.output, step.requests
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
        scheduler = self._scheduler
        if not (scheduler.waiting or scheduler.held or self._gate):
            return []
        found, reason = [], step.stopped_by
        for request in islice(scheduler.waiting, MAX_WAITING):
            is_sibling = request.family is not None and request.family.first is not request
            why = "sibling" if is_sibling and not reason else reason or "order"
            found.append(Waiting(request.request_id, why, request.num_tokens, request.key[0]))
            reason = "order" if reason in ("budget", "blocks") else reason
        found += [
            Waiting(request_id, "pause", request.num_tokens, request.key[0])
            for request_id, request in scheduler.held.items()
        ]
        found += [
            Waiting(
                gated.request.request_id,
                "grammar",
                len(gated.request.prompt_token_ids),
                gated.request.priority,
            )
            for gated in self._gate
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
        self._steps.append(
            _Processed(
                record,
                times,
                [request.request_id for request in step.requests if request.is_finished],
                self._scheduler.kv_cache_manager.num_free_blocks,
                sum(output.num_sampled),
                output.num_ahead,
            )
        )

    def _step_trace(self, step: _Processed, ranks: dict[int, list[RankTrace]]) -> StepTrace:
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
            self._scheduler.limits.max_num_batched_tokens,
            rows,
            known.waiting,
            known.preempted,
            step.finished,
            [*known.num_free_blocks, step.num_free_blocks],
            step.num_tokens,
            ranks.get(output.step, []),
        )
