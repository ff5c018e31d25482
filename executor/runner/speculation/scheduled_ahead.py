"""Rows that were scheduled before the tokens of the step before were known.

Must not know: how drafts are found or verified, the scheduler, the model.

The core counts as many tokens as can be, and the runner, which has the tokens of the step before
when this one begins, computes those that there are:

    scheduled    … a b c d e      if all drafts b c d were accepted, and e was drawn
    known        … a b x          b was accepted, and x was drawn: x is computed, and, by a model
                                  whose states end before its drafts, b before it
"""

from __future__ import annotations

import msgspec
import numpy as np

from ....ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ...input_batch import InputBatch
from ..plain_step import StepRunner


class ScheduledAhead:
    """A StepRunner around one that drafts, where steps overlap."""

    def __init__(self, batch: InputBatch, step: StepRunner):
        self._batch, self._step = batch, step
        # by slot: how many tokens of its request are computed
        self._num_computed = np.zeros(len(batch.num_tokens), np.int64)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner."""
        slots = np.array(scheduler_output.slots, np.int64)
        starts = np.array(scheduler_output.num_computed_tokens, np.int64)
        counts = np.array(scheduler_output.num_scheduled_tokens, np.int64)
        known = self._batch.num_tokens[slots]
        is_ahead = starts + counts > known
        if is_ahead.any():
            # a row that failed in the step before has nothing to compute; its result is not used
            computed = np.minimum(self._num_computed[slots], known - 1)
            starts = np.where(is_ahead, computed, starts)
            counts = np.where(is_ahead, known - computed, counts)
            scheduler_output = msgspec.structs.replace(
                scheduler_output,
                num_computed_tokens=starts.tolist(),
                num_scheduled_tokens=counts.tolist(),
            )
        result = self._step.execute_model(scheduler_output)
        self._num_computed[slots] = starts + counts
        if result.num_ahead:
            self._num_computed[slots] += result.num_ahead
        return result
