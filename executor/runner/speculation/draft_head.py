"""Drafts of a head, which reads hidden states of the model that verifies (models/draft_heads.py).

Must not know: how a draft is verified, how many drafts are worth their cost, files.

A head's position i needs the hidden state of position i and the token after it. So it follows every
pass of the model, once the tokens of that pass are known:

    known      a b c d e      the model has computed a to d, and drawn e
    held       a b c d        the hidden states of that pass, each with the next token: b c d e
    drafting   a b c d x y    a pass over what is held gives x, one of x gives y: drafts x y z

A pass with more positions than may be held, such as one of a prompt, is computed at once, except
for the last position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...input_batch import InputBatch
from ..step_inputs import StepInputs
from .draft_passes import DraftPasses, pass_over, within
from .proposers import NOTHING


class HeadDrafter:
    """The head's `state` [tokens, hidden_size] is what its next pass reads. A request that has
    missed a pass of the model gets no more drafts until it enters a slot again.

    most_held: positions of a request whose hidden states wait for the next drafts, which compute
    them in their first pass.
    """

    sees_every_pass = True

    def __init__(self, passes: DraftPasses, batch: InputBatch, max_model_len: int, most_held: int):
        self.passes = passes
        self._batch = batch
        self.max_model_len = max_model_len
        num_slots = len(batch.num_tokens)
        # by slot: positions that the head has computed; hidden states of those that follow
        self._num_computed = np.zeros(num_slots, np.int64)
        self._num_held = np.zeros(num_slots, np.int64)
        self._held = torch.zeros(
            num_slots, most_held, *self._state.shape[1:], dtype=self._state.dtype
        )

    @property
    def _state(self) -> torch.Tensor:
        return self.passes.model.state

    def enter(self, slot: int, num_computed: int) -> None:
        # what the prefix cache holds, the head has mostly computed too
        self._num_computed[slot], self._num_held[slot] = num_computed, 0

    def leave(self, slot: int) -> None:
        pass

    @torch.inference_mode()
    def observe(self, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Takes a pass of the model, whose drawn tokens are known; hidden [T, hidden_size]."""
        batch, most_held = self._batch, self._held.shape[1]
        ends = inputs.metadata.query_start_loc.tolist()
        slots, counts, starts, parts = [], [], [], []
        for row, slot in enumerate(inputs.slots.tolist()):
            computed, num_held = int(self._num_computed[slot]), int(self._num_held[slot])
            start = computed + num_held
            # a model with states computes accepted drafts again, which the head has seen
            num_seen = start - int(inputs.positions[ends[row]])
            first = ends[row] + num_seen
            # positions whose next token is known; drafts that were refused are none
            count = min(ends[row + 1] - first, int(batch.num_tokens[slot]) - 1 - start)
            if count <= 0 or num_seen < 0:
                continue
            held = self._held[slot]
            if num_held + count <= most_held:
                held[num_held : num_held + count] = hidden[first : first + count]
                self._num_held[slot] = num_held + count
                continue
            slots.append(slot)
            counts.append(num_held + count - 1)
            starts.append(computed)
            # a copy, because the first one held is overwritten
            parts.append(torch.cat([held[:num_held], hidden[first : first + count - 1]]))
            held[0] = hidden[first + count - 1]
            self._num_computed[slot], self._num_held[slot] = start + count - 1, 1
        if slots:
            self.passes.make_inputs.restart()
            own = self.passes.make_inputs(pass_over(slots, counts, starts))
            torch.cat([parts[index] for index in own.order], out=self._state[: sum(counts)])
            self.passes.forward(own)

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], counts: Sequence[int], room: int) -> list[np.ndarray]:
        batch, drafts = self._batch, [NOTHING] * len(slots)
        chosen = np.array(slots, np.int64)
        known = batch.num_tokens[chosen]
        wanted = np.where(self.is_ready(chosen), np.array(counts, np.int64), 0).tolist()
        rows, left = within(list(slots), wanted, room, known, self.max_model_len)
        if not rows:
            return drafts
        order = self.order(chosen[rows])
        rows, left = np.array(rows)[order], left[order]
        drafting, before = chosen[rows], known[rows]
        continues = self._first_drafts(drafting) & (left > 1)
        if continues.any():
            if not continues.all():
                self._keep_rows(continues)
            self.passes.decode(drafting[continues], left[continues] - 1, self._keep_rows)
        ends = batch.num_tokens[drafting]
        batch.num_tokens[drafting] = before
        self._num_computed[drafting], self._num_held[drafting] = before - 1, 0
        for row, slot, start, end in zip(rows.tolist(), drafting, before.tolist(), ends.tolist()):
            drafts[row] = batch.token_ids[slot, start:end].copy()
        return drafts

    def is_ready(self, slots: np.ndarray) -> np.ndarray:
        """slots [B] -> [B] bool: whether what is held reaches to the last known token."""
        num_held = self._num_held[slots]
        known = self._batch.num_tokens[slots]
        return (num_held > 0) & (self._num_computed[slots] + num_held == known - 1)

    def order(self, slots: np.ndarray) -> np.ndarray:
        """The order of `slots` [B] in a pass over what is held: one position first (StepInputs)."""
        return np.argsort(self._num_held[slots] != 1, kind="stable")

    def _first_inputs(self, slots: np.ndarray) -> StepInputs:
        """The inputs of a pass over what is held of `slots` [B], and its state."""
        counts = self._num_held[slots].tolist()
        starts = self._num_computed[slots].tolist()
        self.passes.make_inputs.restart()
        inputs = self.passes.make_inputs(pass_over(slots.tolist(), counts, starts))
        held = [self._held[slot, : self._num_held[slot]] for slot in inputs.slots.tolist()]
        torch.cat(held, out=self._state[: sum(counts)])
        return inputs

    def _first_drafts(self, slots: np.ndarray) -> np.ndarray:
        """Computes the positions that are held of `slots` [B] and appends the first draft of each;
        the state has a row for each then. Returns [B] bool: whose logits are finite.
        """
        before, state = self._batch.num_tokens[slots], self._state
        inputs = self._first_inputs(slots)
        self.passes.append(slots, *self.passes.forward(inputs))
        if len(inputs.token_ids) > len(slots):
            state[: len(slots)] = state[inputs.logits_indices]
        return self._batch.num_tokens[slots] > before

    def _keep_rows(self, rows: np.ndarray) -> None:
        kept = self._state[: len(rows)][torch.from_numpy(rows)]
        self._state[: len(kept)] = kept
