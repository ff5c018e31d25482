"""Passes whose last layers compute only the rows that are read: those with logits.

Must not know: requests, what a program consists of, why rows are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.cpu.native.recorder import Limits
from ...kernels.cpu.native.replay import Program
from ...kernels.ops import AttentionMetadata, ImageRows, make_metadata
from ...kernels.registry import OpTable
from ..model import Forward, Model
from .step_program import WrappedForward, record_step


class Sections(NamedTuple):
    """A model's sections and their programs. `last` reads the `state` of the second model."""

    models: tuple[Model, Model]
    first: Program
    last: Program


class NarrowedForward(WrappedForward):
    """A Forward of a model whose last layers keep nothing of a request. These layers compute only
    the rows of logits_indices, with the bits that they have in a whole pass, unless all hidden
    states are read.
    """

    def __init__(self, forward: Forward, sections: Sections, reads_all: Callable[[], bool]):
        """reads_all: whether the hidden states of other rows than those with logits are read."""
        super().__init__(forward)
        self.sections, self._reads_all = sections, reads_all

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        logits_indices: torch.Tensor,
        token_types: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """See Forward. Unless all hidden states are read, they are [R, hidden_size]."""
        num_rows = len(logits_indices)
        if num_rows >= len(token_ids) or self._reads_all():
            return self.forward(token_ids, positions, metadata, logits_indices, token_types)
        (_, model), first, last = self.sections
        (of_all,) = first(token_ids, positions, metadata, logits_indices)
        if not num_rows:
            return last.hidden[:0], *(result[:0] for result in last.of_logits)
        torch.index_select(of_all, 0, logits_indices, out=model.state[:num_rows])
        own_positions = positions[logits_indices]
        own = rows_of(metadata, own_positions, logits_indices)
        return last(token_ids[logits_indices], own_positions, own, torch.arange(num_rows))


def record_sections(
    model: Model, ops: OpTable, limits: Limits, num_groups: int, all_agree: Callable[[bool], bool]
) -> Sections | None:
    """Records the sections of a model. None: it has none, or they cannot be recorded."""
    found = model.sections(limits.num_logits)
    if found is None:
        return None
    rows = limits.num_logits
    first, last = (
        record_step(model, ops, own, num_groups, all_agree)
        for model, own in zip(found, (limits, Limits(rows, rows, rows)))
    )
    return None if first is None or last is None else Sections(found, first, last)


def rows_of(
    metadata: AttentionMetadata, positions: torch.Tensor, indices: torch.Tensor
) -> AttentionMetadata:
    """Of a step's tokens at `indices` [R], with `positions` [R]: each is a request of one token,
    whose context ends with it.
    """
    requests = torch.searchsorted(metadata.query_start_loc, indices, right=True) - 1
    groups = metadata.groups or (metadata,)
    tables = torch.stack([group.block_tables for group in groups]).index_select(1, requests)
    lengths, num_rows = positions.int() + 1, len(indices)
    images = metadata.images
    return make_metadata(
        torch.arange(num_rows + 1, dtype=torch.int32),
        lengths,
        tables.unbind(),
        torch.full((len(groups), num_rows), -1).unbind(),
        num_rows,
        [1] * num_rows,
        lengths.tolist(),
        None if metadata.adapters is None else metadata.adapters[indices],
        images=None if images is None else images_of(images, indices),
    )


def images_of(images: ImageRows, indices: torch.Tensor) -> ImageRows:
    """Of a step's tokens at `indices` [R]. Their contexts end with them, so that they see no later
    token: the last token of a prompt, or of a chunk, never does.
    """
    return ImageRows(
        images.rows[indices],
        images.offsets[:, indices].contiguous(),
        torch.zeros(len(indices), dtype=torch.int32),
    )
