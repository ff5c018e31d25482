"""The steps of a stage before the last one, which samples: their tokens arrive with a later step.

Must not know: the model, processes, how tokens are sampled.

    this stage    [ step 1 ][ step 2 ][ step 3 ]
    last stage              [ step 1 ][ step 2 ][ …
    tokens                       of 1 ▲ in the message that begins step 3

Requests of step 1 are at the earliest in step 3 again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ...ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ..input_batch import InputBatch
from .device_inputs import DeviceTables
from .plain_step import OnePass


class PendingTokens:
    """The steps whose tokens the last stage has sampled or will, the oldest first.

    tables: of a device, which get the tokens with the next step.
    """

    def __init__(self, batch: InputBatch, tables: DeviceTables | None = None):
        self._batch, self._tables = batch, tables
        self._steps: deque[tuple[np.ndarray, np.ndarray]] = deque()  # slots, InputBatch.entries

    def expect(self, slots: Sequence[int]) -> None:
        """A step with these rows begins; its differences are already in the tables."""
        rows = np.array(slots, np.int64)
        self._steps.append((rows, self._batch.entries[rows]))

    def append(self, num_sampled: Sequence[int], token_ids: Sequence[int]) -> None:
        """Appends the tokens of the oldest step, as in its ModelRunnerOutput. A slot may have
        another request by now; its tokens are not changed.
        """
        batch, counts = self._batch, np.array(num_sampled, np.int64)
        slots, entries = self._steps.popleft()
        if len(counts) != len(slots) or counts.sum() != len(token_ids):
            raise ValueError(f"num_sampled: must be of {len(slots)} rows, got {list(num_sampled)}")
        starts, mine = np.cumsum(counts) - counts, batch.entries[slots] == entries
        tokens = np.array(token_ids, np.int32)
        if self._tables is not None:
            self._tables.note_sampled_by_host(slots[mine])
        for row in np.flatnonzero(mine & (counts > 0)).tolist():
            run = tokens[starts[row] : starts[row] + counts[row]]
            batch.append_runs(slots[row : row + 1], run[None])


class StageStep:
    """A StepRunner: runs this stage's layers and samples nothing."""

    def __init__(self, step: OnePass, pending: PendingTokens):
        self.step, self._pending = step, pending

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner."""
        self._pending.expect(scheduler_output.slots)
        if scheduler_output.slots:
            self.step.begin(scheduler_output)
        return ModelRunnerOutput([0] * len(scheduler_output.slots), [])
