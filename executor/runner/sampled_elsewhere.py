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

from .device_inputs import DeviceTables
from .input_batch import InputBatch


class SampledElsewhere:
    """The steps whose tokens are not known here, the oldest first."""

    def __init__(self, batch: InputBatch):
        self._batch = batch
        self._steps: deque[tuple[np.ndarray, np.ndarray]] = deque()  # slots, InputBatch.entries

    def expect(self, slots: Sequence[int]) -> None:
        """A step with these rows begins; its differences are already in the tables."""
        rows = np.array(slots, np.int64)
        self._steps.append((rows, self._batch.entries[rows]))

    def append(
        self,
        num_sampled: Sequence[int],
        token_ids: Sequence[int],
        tables: DeviceTables | None = None,
    ) -> None:
        """Appends the tokens of the oldest step, as in its ModelRunnerOutput. A slot may have
        another request by now; its tokens are not changed. tables: of a device, which get the
        tokens with the next step.
        """
        batch, counts = self._batch, np.array(num_sampled, np.int64)
        slots, entries = self._steps.popleft()
        if len(counts) != len(slots) or counts.sum() != len(token_ids):
            raise ValueError(f"num_sampled: must be of {len(slots)} rows, got {list(num_sampled)}")
        starts, mine = np.cumsum(counts) - counts, batch.entries[slots] == entries
        tokens = np.array(token_ids, np.int32)
        if tables is not None:
            tables.note_sampled_by_host(slots[mine])
        for row in np.flatnonzero(mine & (counts > 0)).tolist():
            run = tokens[starts[row] : starts[row] + counts[row]]
            batch.append_runs(slots[row : row + 1], run[None])
