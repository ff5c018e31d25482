"""Layers of which each rank has a part, and what joins their results.

Must not know: architectures, files, requests, how ranks reach each other.

    Linear         rows: each rank has some of the outputs; nothing is joined
    RowLinear      columns: each rank has some of the inputs; the results are added
    PartEmbedding  rows of some tokens; others are zero, and the results are added
    GatheredHead   rows of some tokens; the logits are put side by side
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...kernels.cpu.native.program import is_recording, part_ids
from ..ranks.tensor_group import TensorGroup
from .linear import Embedding, Linear, Packer, Weights


class Slice(NamedTuple):
    """What a rank keeps of a stored tensor."""

    dim: int
    begin: int
    end: int
    size: int  # of the stored tensor in `dim`

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        """The part, contiguous; a view of the stored tensor where it is."""
        return stored.narrow(self.dim, self.begin, self.end - self.begin).contiguous()

    def stored_shape(self, part: torch.Tensor) -> list[int]:
        shape = list(part.shape)
        shape[self.dim] = self.size
        return shape


class RowLinear(Linear):
    """A linear layer whose inputs are spread over the ranks. Products of the parts are added in
    fp32 before they are rounded, where the kernel returns fp32.
    """

    def __init__(
        self,
        shards: dict[str, int],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        packer: Packer,
        group: TensorGroup,
    ):
        super().__init__(shards, weight, bias, packer)
        self._group = group

    def pack(self) -> None:
        """See Linear. Only the first rank adds the bias."""
        if self._group.rank and self.bias is not None:
            self.bias.zero_()
        super().pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, this rank's in_features] -> [T, out_features], the same on all ranks"""
        return self._group.all_reduce(super().logits(x), x.dtype)


class PartEmbedding(Embedding):
    """The rows [begin, begin + n) of the table."""

    def __init__(self, name: str, weight: torch.Tensor, ops: Any, begin: int, group: TensorGroup):
        super().__init__(name, weight, ops)
        self._begin, self._count, self._group = begin, len(weight), group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size], the same on all ranks"""
        if is_recording():
            part = super().__call__(part_ids(token_ids, self._begin))
        else:
            rows = token_ids - self._begin
            is_elsewhere = (rows < 0) | (rows >= self._count)
            found = super().__call__(rows.masked_fill(is_elsewhere, 0))
            part = found.masked_fill(is_elsewhere[:, None], 0)
        return self._group.all_reduce(part, part.dtype)


class GatheredHead:
    """An output head whose tokens are spread over the ranks."""

    def __init__(self, part: Linear, num_tokens: int, group: TensorGroup):
        self.part, self._group = part, group
        ranges = [group.even_range(num_tokens, rank) for rank in range(group.size)]
        self._widths = [end - begin for begin, end in ranges]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in_features] -> [R, vocab_size] f32, the same on all ranks"""
        return self._group.all_gather(self.part.logits(x), self._widths)

    def weights(self, prefix: str) -> Weights:
        yield from self.part.weights(prefix)
