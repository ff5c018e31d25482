"""The steps of a stage before the last one, which samples: their tokens arrive with a later step.

Must not know: the model, processes, how tokens are sampled.

    this stage    [ step 1 ][ step 2 ][ step 3 ]
    last stage              [ step 1 ][ step 2 ][ …
    tokens                       of 1 ▲ in the message that begins step 3

Requests of step 1 are at the earliest in step 3 again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ...ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ..input_batch import InputBatch
from .device_inputs import DeviceTables
from .plain_step import OnePass
from .speculation.staged import KeptDrafts


class PendingTokens:
    """The steps whose tokens the last stage has sampled or will, the oldest first.

    tables: of a device, which get the tokens with the next step. kept: of an engine that drafts.
    """

    def __init__(
        self,
        batch: InputBatch,
        tables: DeviceTables | None = None,
        kept: KeptDrafts | None = None,
    ):
        self._batch, self._tables, self._kept = batch, tables, kept
        self._steps: deque[tuple[np.ndarray, np.ndarray]] = deque()  # slots, InputBatch.entries

    def expect(self, slots: Sequence[int]) -> None:
        """A step with these rows begins; its differences are already in the tables."""
        rows = np.array(slots, np.int64)
        self._steps.append((rows, self._batch.entries[rows]))

    def append(
        self,
        num_sampled: Sequence[int],
        token_ids: Sequence[int],
        num_drafts: Sequence[int] = (),
        draft_ids: Sequence[int] = (),
    ) -> None:
        """Appends the tokens of the oldest step, as in its ModelRunnerOutput, and keeps the drafts
        that follow them, as in StepDone. A slot may have another request by now; its tokens are
        not changed.
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
        if self._kept is not None and len(num_drafts):
            drafts = np.split(np.array(draft_ids, np.int32), np.cumsum(num_drafts)[:-1])
            rows = np.flatnonzero(mine).tolist()
            self._kept.keep(slots[mine].tolist(), [drafts[row] for row in rows])


class StageStep:
    """A StepRunner: runs the layers of its stage and samples nothing. `placed` puts the drafts of a
    step behind the known tokens and returns the step that computes them, too.
    """

    def __init__(
        self,
        step: OnePass,
        pending: PendingTokens,
        placed: Callable[[SchedulerOutput], SchedulerOutput],
    ):
        self.step, self._pending, self._placed = step, pending, placed

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner."""
        self._pending.expect(scheduler_output.slots)
        if scheduler_output.slots:
            self.step.begin(self._placed(scheduler_output))
        return ModelRunnerOutput([0] * len(scheduler_output.slots), [])
