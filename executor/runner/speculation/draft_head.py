"""Drafts of a head, which reads hidden states of the model that verifies (models/draft_heads.py).

Must not know: how a draft is verified, how many drafts are worth their cost, files.

A head's position i needs the hidden state of position i and the token after it. So it takes part in
every pass of the model, once the tokens of that pass are known:

    known      a b c d e      the model has computed a to d, and drawn e
    a pass     a b c          each with the next token: b c d
    held             d        its hidden state, until the next pass or the drafts
    drafting         d x y    with e x y: drafts x y z
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....ipc.step_messages import SchedulerOutput
from ..input_batch import InputBatch
from ..step_inputs import StepInputs
from .draft_passes import DraftPasses, within
from .proposers import NOTHING

NONE = -2  # as a position: no hidden state is held


class HeadDrafter:
    """The head's `state` [tokens, hidden_size] is what its next pass reads. A request that has
    missed a pass of the model gets no more drafts until it enters a slot again.
    """

    sees_every_pass = True

    def __init__(self, passes: DraftPasses, batch: InputBatch, max_model_len: int):
        self.passes = passes
        self._batch = batch
        self._max_model_len = max_model_len
        num_slots = len(batch.num_tokens)
        # by slot: positions that the head has computed; a hidden state of the model, its position
        self._num_computed = np.zeros(num_slots, np.int64)
        self._held = torch.zeros(num_slots, *self._state.shape[1:], dtype=self._state.dtype)
        self._held_at = np.full(num_slots, NONE, np.int64)

    @property
    def _state(self) -> torch.Tensor:
        return self.passes.model.state

    def enter(self, slot: int, num_computed: int) -> None:
        # what the prefix cache holds, the head has mostly computed too
        self._num_computed[slot], self._held_at[slot] = num_computed, NONE

    def leave(self, slot: int) -> None:
        pass

    @torch.inference_mode()
    def observe(self, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Takes a pass of the model, whose drawn tokens are known; hidden [T, hidden_size]."""
        batch = self._batch
        ends = inputs.metadata.query_start_loc.tolist()
        slots, counts, starts, parts = [], [], [], []
        for row, slot in enumerate(inputs.slots.tolist()):
            first, end = ends[row], ends[row + 1]
            start = int(inputs.positions[first])
            # positions whose next token is known; drafts that were refused are none
            count = min(end - first, int(batch.num_tokens[slot]) - 1 - start)
            computed, held_at = int(self._num_computed[slot]), int(self._held_at[slot])
            is_held = computed == held_at == start - 1
            if count <= 0 or not (is_held or computed == start):
                continue
            if count + is_held > 1:
                slots.append(slot)
                counts.append(count - 1 + is_held)
                starts.append(computed)
                if is_held:
                    # a copy, because the table's row is overwritten
                    parts.append(
                        torch.cat([self._held[slot][None], hidden[first : first + count - 1]])
                    )
                else:
                    parts.append(hidden[first : first + count - 1])
            self._held[slot] = hidden[first + count - 1]
            self._num_computed[slot] = self._held_at[slot] = start + count - 1
        if slots:
            self.passes.make_inputs.restart()
            own = self.passes.make_inputs(SchedulerOutput(0, slots, counts, starts, []))
            torch.cat([parts[index] for index in own.order], out=self._state[: sum(counts)])
            self.passes.forward(own)

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], counts: Sequence[int], room: int) -> list[np.ndarray]:
        batch, drafts = self._batch, [NOTHING] * len(slots)
        chosen = np.array(slots, np.int64)
        known = batch.num_tokens[chosen]
        is_ready = (self._held_at[chosen] == known - 2) & (self._num_computed[chosen] == known - 2)
        wanted = np.where(is_ready, np.array(counts, np.int64), 0).tolist()
        rows, left = within(list(slots), wanted, room, known, self._max_model_len)
        if not rows:
            return drafts
        drafting, before = chosen[rows], known[rows]
        self._state[: len(rows)] = self._held[torch.from_numpy(drafting)]
        self.passes.make_inputs.restart()
        self.passes.decode(drafting, left, self._keep_rows)
        ends = batch.num_tokens[drafting]
        batch.num_tokens[drafting] = before
        self._num_computed[drafting], self._held_at[drafting] = before - 1, NONE
        for row, slot, start, end in zip(rows, drafting, before.tolist(), ends.tolist()):
            drafts[row] = batch.token_ids[slot, start:end].copy()
        return drafts

    def _keep_rows(self, rows: np.ndarray) -> None:
        kept = self._state[: len(rows)][torch.from_numpy(rows)]
        self._state[: len(kept)] = kept
