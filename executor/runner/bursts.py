"""Runs steps with lookahead tokens in one call of a recorded program.

Must not know: the model, what decides how far to look ahead.
"""

from __future__ import annotations

import numpy as np
import torch

from ...ipc.step_messages import ModelRunnerOutput, RowError, SchedulerOutput
from ...kernels.cpu.native.passes import Passes
from ...kernels.cpu.native.replay import Program
from ..input_batch import InputBatch
from ..sampling.sampler import NOT_FINITE, draw_parameters
from .plain_step import StepRunner
from .step_inputs import StepInputMaker


class Bursts:
    """Decodes whose rows all have the same number of lookahead tokens.

    Only for rows whose tokens depend on nothing but logits and parameters.
    """

    def __init__(self, program: Program, batch: InputBatch, make_inputs: StepInputMaker):
        self.program, self.make_inputs = program, make_inputs
        self.passes = Passes(program, batch.block_size)
        self._batch = batch

    def fits(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether run() supports this step: one token of each row, its last known one, and equal
        lookahead.
        """
        wanted, slots = scheduler_output.num_lookahead_tokens, scheduler_output.slots
        if (
            not wanted
            or not wanted[0]
            or wanted.count(wanted[0]) != len(wanted)
            or scheduler_output.num_scheduled_tokens.count(1) != len(slots)
            or not self._batch.special_slots.isdisjoint(slots)
        ):
            return False
        return (self._batch.num_tokens[slots] - 1).tolist() == scheduler_output.num_computed_tokens

    def run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Gives the same result as consecutive steps."""
        count = 1 + scheduler_output.num_lookahead_tokens[0]
        inputs = self.make_inputs.for_burst(scheduler_output, count)
        slots = inputs.slots
        draw = None
        if self._batch.draws(slots):
            draw = (
                *draw_parameters(self._batch, slots, torch.device("cpu")),
                torch.from_numpy(self._batch.num_tokens[slots]),
            )
        tokens, is_finite = self.passes(
            inputs.token_ids, inputs.positions, inputs.metadata, inputs.logits_indices, count, draw
        )
        by_row = tokens.numpy().T
        if not torch.all(is_finite):
            return self._end_at_not_finite(slots, by_row, is_finite.numpy())
        self._batch.append_runs(slots, by_row)
        return ModelRunnerOutput([count] * len(slots), by_row.ravel().tolist())

    def _end_at_not_finite(
        self, slots: np.ndarray, by_row: np.ndarray, is_finite: np.ndarray
    ) -> ModelRunnerOutput:
        """A row whose logits are not finite keeps the tokens before these.

        by_row [R, count]: the tokens of `slots`. is_finite [count, R].
        """
        num_good = np.logical_and.accumulate(is_finite).sum(axis=0).tolist()
        for slot, row, num_tokens in zip(slots, by_row, num_good):
            self._batch.append_runs(np.array([slot]), row[None, :num_tokens])
        errors: dict[int, RowError] = {
            slot: NOT_FINITE
            for slot, num_tokens in zip(slots.tolist(), num_good)
            if num_tokens < len(is_finite)
        }
        return ModelRunnerOutput(
            num_good,
            [token for row, n in zip(by_row.tolist(), num_good) for token in row[:n]],
            errors=errors,
        )


class BurstStep:
    """A StepRunner: a burst where one fits, else `step`."""

    def __init__(self, bursts: Bursts, step: StepRunner):
        self._bursts, self._step = bursts, step

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner."""
        if self._bursts.fits(scheduler_output):
            return self._bursts.run(scheduler_output)
        return self._step.execute_model(scheduler_output)
