"""The tensors of a model's weight-name table, and what becomes of the values that fill them.

Must not know: files, names, what a layer computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


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


class RowOrder(NamedTuple):
    """The rows that a rank keeps of a stored tensor, all or some, in an order of its own."""

    rows: torch.Tensor  # [rows] i64: the stored row of each row
    size: int  # the number of stored rows

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        return stored[self.rows]

    def stored_shape(self, part: torch.Tensor) -> list[int]:
        return [self.size, *part.shape[1:]]


class ColumnOrder(NamedTuple):
    """The columns that a rank keeps of a stored matrix, in an order of its own."""

    columns: torch.Tensor  # [columns] i64: the stored column of each column
    size: int  # the number of stored columns

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        return stored[:, self.columns]

    def stored_shape(self, part: torch.Tensor) -> list[int]:
        return [len(part), self.size]

    def blocks(self, num_columns: int) -> torch.Tensor | None:
        """The stored blocks of so many columns that it consists of, [blocks] i64; None where it
        would cut one.
        """
        if len(self.columns) % num_columns:
            return None
        of_blocks = self.columns.view(-1, num_columns)
        firsts = of_blocks[:, :1]
        is_whole = (firsts % num_columns == 0).all() and torch.equal(
            of_blocks, firsts + torch.arange(num_columns)
        )
        return firsts[:, 0] // num_columns if is_whole else None


class Rearranged(NamedTuple):
    """A matrix whose numbers the file has in another shape and order."""

    shape: tuple[int, ...]  # in the file
    view: tuple[int, ...]  # of the same numbers
    dims: tuple[int, ...]  # the order of the view's dimensions; the first are the matrix's rows

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.view(self.view).permute(self.dims).flatten(1).contiguous()

    def stored_shape(self, part: torch.Tensor) -> list[int]:
        return list(self.shape)


Part = Slice | RowOrder | ColumnOrder | Rearranged


class Weight(torch.Tensor):
    """A tensor of the weight-name table that LayerFactory.fill does not just copy values into:
    `layer` takes them (its method fill), a rank keeps a `part` of them or has them in another
    order, or an `offset` is added.

    `shard` is the index of the projection in a merged linear layer.
    """

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, tensor: torch.Tensor, *_: Any, **__: Any) -> Weight:
        return torch.Tensor._make_subclass(cls, tensor)

    def __init__(
        self,
        tensor: torch.Tensor,
        layer: Any = None,
        shard: int = 0,
        part: Part | None = None,
        offset: float = 0.0,
    ):
        self.layer, self.shard, self.part, self.offset = layer, shard, part, offset

    @property
    def stored_shape(self) -> list[int]:
        """The shape of the values that fill it."""
        return list(self.shape) if self.part is None else self.part.stored_shape(self)


def layer_of(tensor: torch.Tensor) -> Any:
    """The layer that takes the values of a tensor of the weight-name table; None if none does."""
    return tensor.layer if isinstance(tensor, Weight) else None


def stored_shape(tensor: torch.Tensor) -> list[int]:
    """The shape of the values for a tensor of the weight-name table. A rank may keep a part."""
    return tensor.stored_shape if isinstance(tensor, Weight) else list(tensor.shape)


def kept_part(own: torch.Tensor, part: RowOrder | None) -> torch.Tensor:
    """A tensor for the weight-name table, of which this rank keeps a part; None: all of it."""
    return own if part is None else Weight(own, part=part)
