"""Records some steps: what the scheduler decided and why, and when; the executor adds its part.

Must not know: torch, sockets, who asked for the trace.

    begin ──▶ Scheduler.schedule ──▶ scheduled ──▶ the step runs ──▶ processed
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..ipc.messages import ModelRunnerOutput
from ..ipc.trace import EngineTrace, RanksTrace, Row, StepTrace, Waiting, place_of_function
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep

if TYPE_CHECKING:
    from .engine_core import EngineCore

MAX_WAITING = 32  # requests whose reason is named


class StepTracer:
    """Between `begin` and `processed` of each step; the first `num_steps` are recorded."""

    def __init__(self, core: EngineCore, client_index: int, num_steps: int):
        self._core = core
        self.client_index, self.num_steps = client_index, num_steps
        self.steps: list[StepTrace] = []
        self._num_begun = 0
        self._waits: list[Future[int]] = []
        self._free_before = 0
        self._preempted: dict[str, int] = {}
        # of steps that run: what was known when they were scheduled
        self._scheduled: dict[int, StepTrace] = {}

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
            [replace(step, ranks=ranks.steps.get(step.step, [])) for step in self.steps],
            ranks.limits,
            places | ranks.places,
            ranks.notes,
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
        scheduler, output = self._core.scheduler, step.output
        new = {request.slot for request in output.new_requests}
        lookahead = output.num_lookahead_tokens or [0] * len(output.slots)
        rows = [
            Row(
                request.request_id,
                num_tokens,
                num_computed,
                num_lookahead,
                request.num_tokens,
                slot in new,
                len(block_ids),
                (request.num_cached_tokens or 0) if slot in new else 0,
            )
            for request, slot, num_tokens, num_computed, num_lookahead, block_ids in zip(
                step.requests,
                output.slots,
                output.num_scheduled_tokens,
                output.num_computed_tokens,
                lookahead,
                output.new_block_ids,
            )
        ]
        preempted = [
            request_id
            for request_id, count in self._preempted.items()
            if scheduler.requests[request_id].num_preemptions > count
        ]
        start_time, scheduled_time, _ = step.scheduling
        self._scheduled[output.step] = StepTrace(
            output.step,
            start_time,
            scheduled_time - start_time,
            0.0,
            0.0,
            0.0,
            scheduler.max_num_batched_tokens,
            rows,
            self._waiting(step),
            preempted,
            [],
            [self._free_before, scheduler.kv_cache_manager.num_free_blocks],
            0,
        )

    def _waiting(self, step: ScheduledStep) -> list[Waiting]:
        """The first requests of the queue, and why each waits."""
        core, found, reason = self._core, [], step.stopped_by
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
        scheduler = self._core.scheduler
        free = [*record.num_free_blocks, scheduler.kv_cache_manager.num_free_blocks]
        finished = [request.request_id for request in step.requests if request.is_finished]
        self.steps.append(
            replace(
                record,
                execute_begin_s=times[0],
                execute_s=times[2],
                process_s=times[3],
                finished=finished,
                num_free_blocks=free,
                num_tokens=sum(output.num_sampled),
            )
        )
