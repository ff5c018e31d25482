"""Specifies LoRA adapters. It computes row by row, so that a row's bits do not depend on the
others.

Must not know: speed.
"""

from torch import Tensor

from ..lora import first_blocks
from ..registry import register


@register("add_lora", name="reference", priority=0)
def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    adapters: Tensor,
    indices: Tensor | None,
    slices: list[int],
) -> None:
    of_rows = adapters if indices is None else adapters[indices]
    all_scales, all_ranks, first = scales.tolist(), ranks.tolist(), first_blocks(slices)
    for row, adapter in enumerate(of_rows.tolist()):
        if adapter < 0:
            continue
        for s, columns in enumerate(y[row].split(slices)):
            if rank := all_ranks[adapter][s]:
                low = (a[adapter, s, :rank].float() * x[row].float()).sum(1)
                weight = b[adapter, first[s] : first[s + 1], :rank]
                _add(columns, low * all_scales[adapter][s], weight)


@register("add_lora_embedding", name="reference", priority=0)
def add_lora_embedding(
    y: Tensor,
    token_ids: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    adapters: Tensor,
) -> None:
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0 and (rank := int(ranks[adapter, 0])):
            low = a[adapter, int(token_ids[row]), :rank].float() * scales[adapter, 0]
            _add(y[row], low, b[adapter, :, :rank])


def _add(columns: Tensor, low: Tensor, weight: Tensor) -> None:
    """In place: columns [n] += low [rank] weight [blocks, rank, LORA_BLOCK]."""
    sums = (low[:, None] * weight.float()).sum(1).flatten()
    columns.copy_(columns.float() + sums[: len(columns)])
