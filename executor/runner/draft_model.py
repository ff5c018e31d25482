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

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from ...ipc.step_messages import SchedulerOutput
from ...kernels.registry import OpTable
from ..program.step_program import run_op_by_op
from ..sampling.sampler import draw_parameters, draws
from .bursts import Bursts
from .input_batch import InputBatch
from .proposers import NOTHING
from .step_inputs import StepInputMaker


class DraftModel:
    """`max_num_tokens`: of one pass. `max_model_len`: the longest text of the draft model, which
    drafts nothing beyond it.
    """

    def __init__(
        self,
        model: Any,
        ops: OpTable,
        batch: InputBatch,
        max_num_tokens: int,
        max_model_len: int,
    ):
        self.model = model
        self.ops = ops
        self.program: Callable | None = None  # set by the worker, as the next
        self.bursts: Bursts | None = None
        self.make_inputs = StepInputMaker(batch, batch.block_size)
        self._batch = batch
        self._max_num_tokens, self._max_model_len = max_num_tokens, max_model_len
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

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], counts: Sequence[int], room: int) -> list[np.ndarray]:
        batch, drafts = self._batch, [NOTHING] * len(slots)
        num_tokens = batch.num_tokens[list(slots)]
        rows, left = [], []
        for row, (count, known) in enumerate(zip(counts, num_tokens.tolist())):
            count = min(count, room, self._max_model_len - known)
            if count > 0:
                rows.append(row)
                left.append(count)
                room -= count
        if not rows:
            return drafts
        drafting = np.array([slots[row] for row in rows])
        before = batch.num_tokens[drafting]
        self.make_inputs.restart()
        self._catch_up(drafting)
        self._decode(drafting, np.array(left))
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
            self._forward(SchedulerOutput(0, chosen, lengths, starts, []))
            computed[chosen] += lengths

    def _decode(self, slots: np.ndarray, left: np.ndarray) -> None:
        """Appends `left` [B] drafts to each of `slots` [B]. Rows whose logits are not finite get
        fewer.
        """
        batch = self._batch
        while len(slots):
            count = int(left.min())
            starts = batch.num_tokens[slots]
            step = SchedulerOutput(0, slots.tolist(), [1] * len(slots), (starts - 1).tolist(), [])
            if self.bursts is not None:
                ahead = [count - 1] * len(slots)
                self.bursts.run(msgspec.structs.replace(step, num_lookahead_tokens=ahead))
            else:
                count = 1
                self._append(slots, *self._forward(step))
            left = left - count
            goes_on = (left > 0) & (batch.num_tokens[slots] == starts + count)
            slots, left = slots[goes_on], left[goes_on]

    def _append(
        self,
        slots: np.ndarray,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        largest: torch.Tensor,
        is_finite: torch.Tensor,
    ) -> None:
        """Draws a token for each of `slots` [B]."""
        batch, drawn, good = self._batch, largest, is_finite.numpy()
        if not good.all():
            logits[~is_finite] = 0.0  # safe to draw from
        if draws(batch, slots):
            positions = torch.from_numpy(batch.num_tokens[slots])
            parameters = draw_parameters(batch, slots, logits.device)
            drawn = self.ops.sample_tokens(logits, *parameters, positions)
        batch.append_tokens(slots[good], drawn.numpy()[good])

    def _forward(self, step: SchedulerOutput) -> tuple[torch.Tensor, ...]:
        inputs = self.make_inputs(step)
        return self.run(inputs.token_ids, inputs.positions, inputs.metadata, inputs.logits_indices)

    def run(self, *step: Any) -> tuple[torch.Tensor, ...]:
        """The arguments and results of run_op_by_op."""
        return (
            run_op_by_op(self.model, self.ops, *step)
            if self.program is None
            else self.program(*step)
        )
