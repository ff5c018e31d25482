"""Steps whose tokens stay on the device: launched without waiting, finished when the result is
needed.

Must not know: how rows that need more than their logits and parameters are sampled, requests beyond
their slot. Steps with such rows run in the plain order.

    host          launch N      launch N + 1     finish N            launch N + 2     finish N + 1
                     │               │         waits for (a)              │         waits for (b)
    first stream     └▶[ inputs, model, draw, tokens into the tables ][ the next step's ][ …
    second stream                                                 [ copy ](a)         [ copy ](b)

A launch increases each sampled row's number of tokens; the host learns their values when it
finishes the step. In between, a slot may have been freed and given to another request: on the
device, the step precedes the new request's on the same stream; on the host, a token is written only
to its own request. A row whose logits are not finite is found when the step is finished; steps
launched after it compute that row with token 0, and their results are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ipc.step_messages import ModelRunnerOutput, RowError, SchedulerOutput
from ..device import CopyToHost
from ..input_batch import InputBatch
from ..model import Forward
from ..sampling.sampler import NOT_FINITE
from .device_inputs import WORDS_ALIGNED, DeviceInputMaker, DeviceTables, aligned
from .look_ahead import LookAhead
from .step_inputs import StepInputs, StepLayout, lay_out


@dataclass(frozen=True, eq=False, slots=True)
class Expected:
    """The tokens of one pass of a step. Columns are parallel."""

    columns: np.ndarray  # [R] index into SchedulerOutput.slots
    slots: np.ndarray  # [R]
    positions: np.ndarray  # [R] of the new tokens in their sequences
    entries: np.ndarray  # [R] the requests in these slots: InputBatch.entries
    place: slice  # their place among the step's results


class PendingStep:
    """A launched step. `result` may be called repeatedly, by the thread that launches."""

    def __init__(
        self,
        batch: InputBatch,
        scheduler_output: SchedulerOutput,
        passes: list[Expected],
        is_plain: bool,
        wait: Callable[[], np.ndarray],
    ):
        """`wait` returns the step's results [N] i32: tokens, or negative numbers where logits were
        not finite.

        is_plain: one pass of decodes that are all sampled.
        """
        self._batch = batch
        self._slots = scheduler_output.slots
        self._passes = passes
        self._wait = wait
        self._is_plain = is_plain
        self._result: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        """Waits for the tokens and writes them to the host's tables."""
        if self._result is None:
            values = self._wait()
            for one in self._passes:
                self._batch.fill_in(one.slots, one.positions, one.entries, values[one.place])
            self._result = self._make_output(values)
        return self._result

    def _make_output(self, values: np.ndarray) -> ModelRunnerOutput:
        """Each row's tokens up to its failure, in the order of the SchedulerOutput."""
        num_rows = len(self._slots)
        if self._is_plain and (values[:num_rows] >= 0).all():  # most steps
            return ModelRunnerOutput([1] * num_rows, values[:num_rows].tolist())
        # [rows, passes]; a row of one pass is in all passes before it
        token_ids = np.zeros((num_rows, len(self._passes)), np.int64)
        is_expected = np.zeros(token_ids.shape, bool)
        for number, one in enumerate(self._passes):
            token_ids[one.columns, number] = values[one.place]
            is_expected[one.columns, number] = True
        is_good = np.logical_and.accumulate(is_expected & (token_ids >= 0), axis=1)
        errors: dict[int, RowError] = {
            self._slots[row]: NOT_FINITE
            for row in np.flatnonzero((is_good != is_expected).any(axis=1)).tolist()
        }
        return ModelRunnerOutput(
            is_good.sum(axis=1).tolist(), token_ids[is_good].tolist(), errors=errors
        )


class HostStep:
    """A step whose tokens the host samples when its result is requested; until then the model
    runs.
    """

    def __init__(self, finish: Callable[[], ModelRunnerOutput]):
        self._finish = finish
        self._result: ModelRunnerOutput | None = None

    def result(self) -> ModelRunnerOutput:
        if self._result is None:
            self._result = self._finish()
            del self._finish  # releases the logits, too
        return self._result


class StepLauncher:
    """Launches steps of rows that need nothing but their logits and parameters."""

    def __init__(
        self,
        batch: InputBatch,
        ops: Any,
        tables: DeviceTables,
        inputs: DeviceInputMaker,
        forward: Forward,
        copy_to_host: CopyToHost,
    ):
        self._batch = batch
        self._ops = ops
        self._tables = tables
        self.inputs = inputs
        self._forward = forward
        self._copy_to_host = copy_to_host
        # in order; finished ones are dropped by the next launch
        self._pending: list[PendingStep] = []

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Launches all kernels around a model, so that no request waits for compilation.

        The tables are empty before and after.
        """
        nothing, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._tables.note_sampled_by_host(nothing)  # an empty run
        layout = StepLayout(
            order=nothing,
            slots=nothing,
            num_computed=nothing,
            query_lens=one,
            query_start_loc=np.arange(2),
            seq_lens=one.astype(np.int32),
            num_decodes=1,
            sampled_rows=nothing,
        )
        (columns,) = self.inputs.ship([layout])
        self.inputs.prepare(layout, columns)
        slots = columns["sampled_slots"]
        results = torch.zeros(1, dtype=torch.int32, device=self._tables.device)
        self._ops.gather_sampling_parameters(self._tables.parameters, slots)
        self._ops.append_sampled_tokens(
            self._tables.token_ids,
            slots,
            columns["positions"],
            results.long(),
            results == 0,
            results,
        )
        self._copy_to_host(results)()

    def finish_all(self) -> None:
        """Waits for all steps so far: the host then knows all tokens."""
        for step in self._pending:
            step.result()
        self._pending = []

    def launch(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Launches a step whose differences are already in the host's tables.

        No row may need anything that only the host has.
        """
        layouts = self._lay_out(scheduler_output)
        for layout in layouts:
            self._batch.check_blocks(layout.slots, layout.seq_lens)
        counts = [len(layout.sampled_rows) for layout in layouts]
        starts = np.cumsum([0, *map(aligned, counts)]).tolist()
        size = max(WORDS_ALIGNED, starts[-1])
        results = torch.empty(size, dtype=torch.int32, device=self._tables.device)
        passes = []
        for layout, columns, start, count in zip(
            layouts, self.inputs.ship(layouts), starts, counts
        ):
            inputs = self.inputs.prepare(layout, columns)
            self._compute(inputs, columns, results[start : start + count])
            passes.append(self._expect(layout, slice(start, start + count)))
        is_plain = len(layouts) == 1 and layouts[0].is_all_sampled_decodes()
        step = PendingStep(
            self._batch, scheduler_output, passes, is_plain, self._copy_to_host(results)
        )
        self._pending = [*(other for other in self._pending if other._result is None), step]
        return step

    def _lay_out(self, scheduler_output: SchedulerOutput) -> list[StepLayout]:
        """The layouts of the step and of each lookahead pass, which decodes the rows that still
        want tokens.
        """
        num_tokens = self._batch.num_tokens
        wanted = np.array(scheduler_output.num_lookahead_tokens, np.int64)
        layouts = [lay_out(scheduler_output, num_tokens)]
        if not wanted.any():
            return layouts
        slots = np.array(scheduler_output.slots, np.int64)
        rows = np.sort(layouts[0].order[layouts[0].sampled_rows])
        for number in range(int(wanted.max())):
            rows = rows[wanted[rows] > number]
            if not len(rows):
                break
            num_computed = num_tokens[slots[rows]] + number
            layouts.append(
                StepLayout(
                    order=rows,
                    slots=slots[rows],
                    num_computed=num_computed,
                    query_lens=np.ones(len(rows), np.int64),
                    query_start_loc=np.arange(len(rows) + 1),
                    seq_lens=(num_computed + 1).astype(np.int32),
                    num_decodes=len(rows),
                    sampled_rows=np.arange(len(rows)),
                )
            )
        return layouts

    def _compute(
        self, inputs: StepInputs, columns: dict[str, torch.Tensor], results: torch.Tensor
    ) -> None:
        """results [R] i32"""
        _, logits, token_ids, is_finite = self._forward(
            inputs.token_ids, inputs.positions, inputs.metadata, inputs.logits_indices
        )
        if not len(results):
            return
        slots, positions, batch = columns["sampled_slots"], columns["positions"], self._batch
        if batch.random_slots and batch.temperature[inputs.sampled_slots].any():
            temperature, *filters, seeds = self._ops.gather_sampling_parameters(
                self._tables.parameters, slots
            )
            filters = filters if batch.filtered_slots else (None, None, None)
            token_ids = self._ops.sample_tokens(
                logits, temperature, *filters, seeds, positions, token_ids
            )
        self._ops.append_sampled_tokens(
            self._tables.token_ids, slots, positions, token_ids, is_finite, results
        )

    def _expect(self, layout: StepLayout, place: slice) -> Expected:
        slots = layout.slots[layout.sampled_rows]
        positions = layout.seq_lens[layout.sampled_rows].astype(np.int64)
        self._batch.expect_tokens(slots, positions)
        return Expected(
            layout.order[layout.sampled_rows], slots, positions, self._batch.entries[slots], place
        )


class LaunchedSteps:
    """A StepRunner whose steps may be launched without waiting. `apply`: puts a step's differences
    into the tables. `look_ahead`: the plain order.
    """

    def __init__(
        self,
        batch: InputBatch,
        apply: Callable[[SchedulerOutput], None],
        launcher: StepLauncher,
        look_ahead: LookAhead,
    ):
        self._batch, self._apply = batch, apply
        self.launcher, self._look_ahead = launcher, look_ahead
        self._host_step: HostStep | None = None  # the previous step, if the host samples it

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Puts the differences of the next step into the tables, after the step before has been
        sampled with what they hold.
        """
        if self._host_step is not None:
            self._host_step.result()
            self._host_step = None
        self._apply(scheduler_output)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner."""
        return self.launch(scheduler_output).result()

    def launch(self, scheduler_output: SchedulerOutput) -> PendingStep | HostStep:
        """As execute_model, but returns without waiting.

        `result()` of the returned object waits, in this same thread. A step may be launched before
        the previous ones have finished.
        """
        slots = scheduler_output.slots
        if slots and self._batch.special_slots.isdisjoint(slots):
            return self.launcher.launch(scheduler_output)
        # Plain order: all previous steps are finished first, and this one before the next is
        # launched. The model runs meanwhile.
        self.launcher.finish_all()
        step = self._look_ahead.step
        begun = step.begin(scheduler_output) if slots else None

        @torch.inference_mode()
        def finish() -> ModelRunnerOutput:
            if begun is None:
                return ModelRunnerOutput([], [])
            return self._look_ahead.follow(scheduler_output, step.end(*begun))

        self._host_step = HostStep(finish)
        return self._host_step
