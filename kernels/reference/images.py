"""Specifies the operations of models that read images.

Must not know: speed.
"""

from torch import Tensor

from ..registry import register
from .rotary import rotary_embedding


@register("replace_rows", name="reference", priority=0)
def replace_rows(x: Tensor, rows: Tensor, table: Tensor) -> None:
    taken = rows >= 0
    x[taken] = table[rows[taken].long()]


@register("add_rows", name="reference", priority=0)
def add_rows(x: Tensor, rows: Tensor, table: Tensor) -> None:
    taken = rows >= 0
    x[taken] = (x[taken].float() + table[rows[taken].long()].float()).to(x.dtype)


@register("clamp", name="reference", priority=0)
def clamp(x: Tensor, bounds: Tensor) -> Tensor:
    return x.clamp(*bounds.to(x.dtype))


@register("rotary_embedding_by_component", name="reference", priority=0)
def rotary_embedding_by_component(
    positions: Tensor,
    offsets: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    components: Tensor,
) -> None:
    angles = cos_sin_cache[positions + offsets]  # [3, T, R]
    both_halves = components.long().repeat(2)  # [R]: of the cosines, then of the sines
    index = both_halves[None, None].expand(1, len(positions), -1)
    rotary_embedding(
        positions.new_tensor(range(len(positions))), query, key, angles.gather(0, index)[0]
    )
