"""Drafts of a second, smaller model, which has a KV cache of its own in blocks of the same ids.

Must not know: how a draft is verified, how many drafts are worth their cost, files.

The draft model draws each token as the model would: with the request's parameters and the random
numbers of the token's position ("drafter-invariant speculative decoding", Daliri, Musco and Suresh
2024). So drafts are accepted at every temperature about as often as distributions agree.

It computes a request's tokens only once drafts of it are wanted, then from where it stopped:

    known         a b c d e     the last token is not computed yet, by either model
    computed      a b           by the draft model
    catching up       c d       one pass
    drafting              e x y     a pass for each draft, x y z
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...input_batch import InputBatch
from ..step_inputs import StepInputs
from .draft_passes import DraftPasses, pass_over, within
from .proposers import NOTHING


class DraftModel:
    """`max_num_tokens`: of one pass. `max_model_len`: the longest text of the draft model, which
    drafts nothing beyond it.
    """

    sees_every_pass, uses_blocks = False, True

    def __init__(
        self, passes: list[DraftPasses], batch: InputBatch, max_num_tokens: int, max_model_len: int
    ):
        """passes: those of one model."""
        [self.passes] = passes
        self.max_model_len = max_model_len
        self._batch, self._max_num_tokens = batch, max_num_tokens
        num_slots = len(batch.num_tokens)
        # by slot: tokens that are computed, and the last drafts, which stood from there on
        self._num_computed = np.zeros(num_slots, np.int64)
        self._drafts: list[np.ndarray] = [NOTHING] * num_slots

    def enter(self, slot: int, num_computed: int) -> None:
        # what the prefix cache holds, the draft model has mostly computed too; where it has not,
        # its drafts are bad
        self._num_computed[slot], self._drafts[slot] = num_computed, NOTHING

    def leave(self, slot: int) -> None:
        pass

    def observe(self, inputs: StepInputs, hidden: torch.Tensor) -> None:
        pass

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], counts: Sequence[int], room: int) -> list[np.ndarray]:
        batch, drafts = self._batch, [NOTHING] * len(slots)
        known = batch.num_tokens[list(slots)]
        rows, left = within(list(slots), list(counts), room, known, self.max_model_len)
        if not rows:
            return drafts
        drafting, before = np.array([slots[row] for row in rows]), known[rows]
        self.passes.make_inputs.restart()
        self._catch_up(drafting)
        self.passes.decode(drafting, left)
        ends = batch.num_tokens[drafting]
        batch.num_tokens[drafting] = before
        for row, slot, start, end in zip(rows, drafting, before.tolist(), ends.tolist()):
            # a copy, because what is accepted is written over it
            drafts[row] = self._drafts[slot] = batch.token_ids[slot, start:end].copy()
            self._num_computed[slot] = start
        return drafts

    def _catch_up(self, slots: np.ndarray) -> None:
        """Computes all known tokens but the last of each slot."""
        batch, computed = self._batch, self._num_computed
        ends = batch.num_tokens[slots] - 1
        for slot, end in zip(slots.tolist(), ends.tolist()):
            start, drafted = computed[slot], self._drafts[slot][:-1]  # the last was not computed
            known = batch.token_ids[slot, start : min(end, start + len(drafted))]
            is_wrong = known != drafted[: len(known)]
            num_right = int(np.argmax(is_wrong)) if is_wrong.any() else len(known)
            computed[slot] = min(end, start + num_right)
        while len(behind := np.flatnonzero(computed[slots] < ends)):
            step, room = [], self._max_num_tokens
            for slot, end in zip(slots[behind].tolist(), ends[behind].tolist()):
                if count := min(end - int(computed[slot]), room):
                    step.append((slot, count, int(computed[slot])))
                    room -= count
            chosen, lengths, starts = (list(column) for column in zip(*step))
            self.passes.forward(self.passes.make_inputs(pass_over(chosen, lengths, starts)))
            computed[chosen] += lengths
