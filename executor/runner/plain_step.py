"""The plain step: inputs, one pass of the model, a token of each row that is complete.

Must not know: requests beyond their slot, why something was scheduled, how a pass is run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ...ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ...kernels.registry import OpTable
from ..input_batch import InputBatch
from ..model import Forward
from ..sampling.sampler import ParameterColumns
from .special_rows import SpecialRows
from .step_inputs import StepInputs

MakeInputs = Callable[[SchedulerOutput], StepInputs]
Begun = tuple[StepInputs, tuple[torch.Tensor, ...]]  # inputs, and the results of Forward


class StepRunner(Protocol):
    """A kind of step. The step's differences are already in the tables.

    Kinds wrap each other; runner/assembly.py says how.
    """

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the scheduled tokens and samples the rows that are complete."""
        ...


class OnePass(StepRunner, Protocol):
    """A step that is one pass of the model, whose second half may be run later."""

    def begin(self, scheduler_output: SchedulerOutput) -> Begun:
        """Runs the model. The results are valid until the next pass."""
        ...

    def end(self, inputs: StepInputs, results: tuple[torch.Tensor, ...]) -> ModelRunnerOutput:
        """Samples the rows that are complete, and appends the tokens to the tables."""
        ...


class PlainStep:
    """Implements OnePass. Rows that need more than their logits and their parameters are those of
    `special`.
    """

    def __init__(
        self,
        batch: InputBatch,
        make_inputs: MakeInputs,
        forward: Forward,
        ops: OpTable,
        special: SpecialRows,
    ):
        self.make_inputs, self.forward, self.special = make_inputs, forward, special
        self.ops = ops
        self._batch = batch
        self._columns = ParameterColumns(batch)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner."""
        if not scheduler_output.slots:
            return ModelRunnerOutput([], [])
        return self.end(*self.begin(scheduler_output))

    def begin(self, scheduler_output: SchedulerOutput) -> Begun:
        """See OnePass."""
        inputs = self.make_inputs(scheduler_output)
        if self._batch.special_slots:
            self.special.begin(inputs)
        return inputs, self.forward(
            inputs.token_ids,
            inputs.positions,
            inputs.metadata,
            inputs.logits_indices,
            inputs.token_types,
        )

    def end(self, inputs: StepInputs, results: tuple[torch.Tensor, ...]) -> ModelRunnerOutput:
        """See OnePass."""
        special = self._batch.special_slots
        if special and not special.isdisjoint(inputs.slots.tolist()):
            return self.special.sample(inputs, *results)
        _, logits, largest, is_finite = results
        if not is_finite.numpy(force=True).all():
            return self.special.sample(inputs, *results)
        slots, num_rows = inputs.sampled_slots, len(inputs.slots)
        if self._batch.draws(slots):
            parameters = self._columns.of(slots, logits.device)
            positions = torch.from_numpy(self._batch.num_tokens[slots]).to(logits.device)
            largest = self.ops.sample_tokens(logits, *parameters, positions, largest)
        token_ids = largest.numpy(force=True)
        self._batch.append_tokens(slots, token_ids)
        if len(slots) == inputs.metadata.num_decodes == num_rows:  # in the order of the step
            return ModelRunnerOutput([1] * num_rows, token_ids.tolist())
        return ModelRunnerOutput(*inputs.in_order_of_step(inputs.sampled_rows, token_ids))
