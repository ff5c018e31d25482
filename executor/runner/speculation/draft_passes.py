"""Passes of a model that drafts: tokens are drawn as the model that verifies would draw them.

Must not know: whose drafts they are, how a draft is verified, files.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch

from ....ipc.step_messages import SchedulerOutput
from ....kernels.cpu.native.replay import Program
from ....kernels.registry import OpTable
from ...input_batch import InputBatch
from ...model import Forward, Model
from ...program.step_program import OpByOp
from ...sampling.sampler import draw_parameters
from ..bursts import Bursts
from ..device_inputs import DeviceInputMaker
from ..image_table import ImageTable
from ..step_inputs import StepInputMaker, StepInputs


class DraftPasses:
    """`ahead`: how many positions a pass's tokens are ahead of the pass's positions: 0 of a model,
    1 of a head, which reads the next token.
    """

    def __init__(
        self,
        model: Model,
        ops: OpTable,
        batch: InputBatch,
        make_inputs: StepInputMaker | DeviceInputMaker,
        ahead: int = 0,
        forward: Forward | None = None,
        images: ImageTable | None = None,
    ):
        """make_inputs: with `ahead` tokens_ahead. forward: None: operation by operation. images: of
        a head that reads rows of images.
        """
        self.model, self.ops, self._images = model, ops, images
        self.run = forward or OpByOp(model, ops)
        self.make_inputs = make_inputs
        self._bursts: Bursts | None = None
        if (
            isinstance(forward, Program)
            and isinstance(make_inputs, StepInputMaker)
            and "sample_tokens" in ops.native
        ):
            self._bursts = Bursts(forward, batch, make_inputs)
        self._batch = batch
        self._ahead = ahead

    def forward(self, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
        """The results of Forward."""
        return self.run(inputs.token_ids, inputs.positions, inputs.metadata, inputs.logits_indices)

    def must_run_now(self, slot: int, first: int, end: int) -> bool:
        """Whether a pass over the positions [first, end) reads rows of images, which are there in
        this step alone.
        """
        images, ahead = self._images, self._ahead
        return images is not None and images.has_rows(slot, first + ahead, end + ahead)

    def decode(
        self,
        slots: np.ndarray,
        left: np.ndarray,
        keep_rows: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        """Appends `left` [B] drafts to each of `slots` [B], whose other tokens but the last are
        computed. Rows whose logits are not finite get fewer.

        keep_rows takes the rows [B] bool that continue when others do not.
        """
        batch = self._batch
        while len(slots):
            count, known = int(left.min()), batch.num_tokens[slots]
            starts = (known - 1 - self._ahead).tolist()
            step = pass_over(slots.tolist(), [1] * len(slots), starts)
            if self._bursts is not None:
                ahead = [count - 1] * len(slots)
                self._bursts.run(msgspec.structs.replace(step, num_lookahead_tokens=ahead))
            else:
                count = 1
                self.append(slots, *self.forward(self.make_inputs(step)))
            left = left - count
            continues = (left > 0) & (batch.num_tokens[slots] == known + count)
            if keep_rows is not None and continues.any() and not continues.all():
                keep_rows(continues)
            slots, left = slots[continues], left[continues]

    def append(
        self,
        slots: np.ndarray,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        largest: torch.Tensor,
        is_finite: torch.Tensor,
    ) -> None:
        """Draws a token for each of `slots` [B]."""
        batch, drawn, good = self._batch, largest, is_finite.numpy(force=True)
        if not good.all():
            logits[~is_finite] = 0.0  # safe to draw from
        if batch.draws(slots):
            positions = torch.from_numpy(batch.num_tokens[slots]).to(logits.device)
            parameters = draw_parameters(batch, slots, logits.device)
            drawn = self.ops.sample_tokens(logits, *parameters, positions)
        batch.append_tokens(slots[good], drawn.numpy(force=True)[good])


def pass_over(slots: list[int], counts: list[int], starts: list[int]) -> SchedulerOutput:
    """The step that computes `counts` [B] positions of `slots` [B] from `starts` [B] on."""
    return SchedulerOutput(
        step=0,
        slots=slots,
        num_scheduled_tokens=counts,
        num_computed_tokens=starts,
        new_block_ids=[],
    )


def within(
    slots: list[int], counts: list[int], room: int, num_tokens: np.ndarray, max_model_len: int
) -> tuple[list[int], np.ndarray]:
    """The rows that get drafts, and how many each, of at most `counts` [B]: `room` together, and
    within `max_model_len` tokens. num_tokens [B]: known ones.
    """
    rows, left = [], []
    for row, (count, known) in enumerate(zip(counts, num_tokens.tolist())):
        count = min(count, room, max_model_len - known)
        if count > 0:
            rows.append(row)
            left.append(count)
            room -= count
    return rows, np.array(left, np.int64)
