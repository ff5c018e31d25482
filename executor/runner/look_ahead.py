"""Runs steps with lookahead tokens pass by pass.

Must not know: the model, how a row is sampled, what decides how far to look ahead.
"""

from __future__ import annotations

from ...ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ..input_batch import InputBatch
from .merged_outputs import merge_outputs
from .plain_step import OnePass


class LookAhead:
    """A StepRunner: the first pass, then a pass for each lookahead token."""

    def __init__(self, batch: InputBatch, step: OnePass):
        self._batch, self.step = batch, step

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner."""
        return self.follow(scheduler_output, self.step.execute_model(scheduler_output))

    def follow(
        self, scheduler_output: SchedulerOutput, first: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        """The output of the whole step, after the output of its first pass."""
        if any(scheduler_output.num_lookahead_tokens):
            return self._decode(scheduler_output, first)
        return first

    def _decode(
        self, scheduler_output: SchedulerOutput, first: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        slots, wanted = scheduler_output.slots, scheduler_output.num_lookahead_tokens
        results = [(list(range(len(slots))), first)]
        rows = [row for row, num_sampled in enumerate(first.num_sampled) if num_sampled]
        for count in range(1, max(wanted) + 1):
            rows = [
                row
                for row in rows
                if wanted[row] >= count and slots[row] not in results[-1][1].errors
            ]
            if not rows:
                break
            row_slots = [slots[row] for row in rows]
            decodes = SchedulerOutput(
                step=scheduler_output.step,
                slots=row_slots,
                num_scheduled_tokens=[1] * len(rows),
                num_computed_tokens=(self._batch.num_tokens[row_slots] - 1).tolist(),
                new_block_ids=[],
            )
            results.append((rows, self.step.execute_model(decodes)))
        return merge_outputs(slots, results)
