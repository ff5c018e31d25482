"""Which states the rows of a step continue, and which copies of them the step makes.

Must not know: what a state is, why it is copied, the model.
"""

from __future__ import annotations

import numpy as np
import torch

from ...ipc.step_messages import SchedulerOutput
from ...kernels.ops import StateRows

NO_STATE = -1  # the place of a padding row
ALL_KNOWN = np.iinfo(np.int64).max  # a last position: the row has no drafts


class StateTable:
    """Of a model that keeps states. The place of a slot's state is the slot."""

    def __init__(self, max_num_seqs: int):
        # of each slot in this step: the position after which its state is copied, or -1, and to
        # which place
        self.copy_positions = np.full(max_num_seqs, -1, np.int64)
        self.copy_places = np.zeros(max_num_seqs, np.int32)

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Notes the copies that the rows of a step make."""
        self.copy_positions[:] = -1
        for slot, position, place in scheduler_output.state_saves:
            self.copy_positions[slot], self.copy_places[slot] = position, place

    def rows(self, slots: np.ndarray, last_positions: np.ndarray) -> StateRows:
        """The rows of `slots` [B], whose last known tokens are at last_positions [B] i64."""
        return StateRows(
            torch.from_numpy(slots.astype(np.int32)),
            torch.from_numpy(last_positions),
            torch.from_numpy(self.copy_positions[slots]),
            torch.from_numpy(self.copy_places[slots]),
        )


def no_states(num_rows: int, device: torch.device | None = None) -> StateRows:
    """States of padding rows."""
    places = torch.full((num_rows,), NO_STATE, dtype=torch.int32, device=device)
    positions = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    return StateRows(places, positions, positions.clone(), places.clone())
