"""Linear layers, embeddings and output heads, whole or divided among ranks.

Must not know: architectures, files, requests, how weights are quantized, how ranks reach each
other.

    Linear         rows: each rank has some of the outputs; nothing is joined
    RowLinear      columns: each rank has some of the inputs; the results are added
    PartEmbedding  rows of some tokens; others are zero, and the results are added
    GatheredHead   rows of some tokens; the logits are put side by side
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...kernels.cpu.native.program import is_recording, part_ids
from ..device import copy_mapped, release_mapped
from ..groups.tensor_group import TensorGroup
from ..weights.packed_rows import PackedRows, pack_blocks
from ..weights.table import ColumnOrder, Part, RowOrder, Slice, Weight
from .adapters import EmbeddingAdapters, LinearAdapters

# (name in the checkpoint, the tensor that it fills: a whole parameter, or a view of merged rows)
Weights = Iterator[tuple[str, torch.Tensor]]
Multiply = Callable[[torch.Tensor], torch.Tensor]


class Packer(NamedTuple):
    """The functions that pack a weight: ops.pack_linear or ops.pack_quantized_linear with its bits,
    its `from_parts` and `from_arrays` if the implementation has them (see the contract of
    pack_linear), ops.pack_gguf_linear, and the device that computes.
    """

    pack: Callable[..., Multiply]
    from_parts: Callable[..., Multiply] | None
    from_arrays: Callable[..., Multiply] | None
    blocks: Callable[..., Multiply]
    device: torch.device


def _not_packed(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a linear layer is called before all its weights are there")


class Linear:
    """Computes y = x W^T + b, for one projection or several stacked projections of the same x (q, k
    and v; gate and up).
    """

    tied_to: Embedding | None = None

    def __init__(
        self,
        shards: dict[str, int],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        packer: Packer,
        adapters: LinearAdapters | None = None,
        parts: Sequence[Part | None] = (),
    ):
        """adapters: those of LoRA. parts: what this rank keeps of each shard, if not all, or the
        order, if not the stored one.
        """
        self.shards = shards  # name in the checkpoint -> rows, in order
        self._weight: torch.Tensor | None = weight  # None once packed
        self.bias = bias
        self._num_unfilled = len(shards) * (1 if bias is None else 2)
        self._packer = packer
        # by index: the shards that stay unpacked until all are there
        self._stored: dict[int, torch.Tensor] = {}
        self._blocks: dict[int, PackedRows] = {}  # the same for blocks of a GGUF file
        self.saved_bytes = 0  # by blocks that are kept
        self._multiply: Multiply = _not_packed
        self.adapters = adapters
        self._parts = parts

    @property
    def weight(self) -> torch.Tensor:
        """[sum of rows, in_features], until it is packed."""
        if self._weight is None:
            raise RuntimeError("the weight is packed: its rows are no longer in one tensor")
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, sum of rows]"""
        y = self._multiply(x)
        if self.adapters is not None:
            self.adapters.add(y, x)
        return y

    @property
    def silu_and_mul(self) -> Multiply | None:
        """The operation of that name on this layer's result, in one pass with the same bits. None:
        there is none. Call it when the weight is packed.
        """
        multiply: Any = self._multiply
        if self.adapters is not None:
            return None
        return multiply.silu_and_mul if getattr(multiply, "can_gate", False) else None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in_features] -> [R, sum of rows] f32"""
        return self._in_fp32(x, is_logits=True)

    def _in_fp32(self, x: torch.Tensor, *, is_logits: bool) -> torch.Tensor:
        """[R, in_features] -> [R, sum of rows] f32. is_logits: of the rows whose logits are
        computed, else of all rows of the step.
        """
        multiply = getattr(self._multiply, "logits", None)
        y = self._multiply(x).float() if multiply is None else multiply(x)
        if self.adapters is not None:
            self.adapters.add(y, x, is_logits=is_logits)
        return y

    def fill(self, tensor: Weight, values: torch.Tensor | PackedRows) -> None:
        """Fills one tensor of `weights`; see LayerFactory.fill.

        Call it once for each tensor. The last call packs the weight.
        """
        is_shard = tensor.dim() == 2
        if isinstance(values, PackedRows):
            self._blocks[tensor.shard] = values
        elif (
            is_shard
            and self._packer.from_parts is not None
            and (values.dtype, values.device) == (tensor.dtype, tensor.device)
        ):
            self._stored[tensor.shard] = values
        else:
            copy_mapped(tensor, values)
        self._num_unfilled -= 1
        if not self._num_unfilled:
            self.pack()

    def pack(self) -> None:
        """Packs the weight into the layout that the device multiplies best. Call it once, when all
        values are there.
        """
        shards, packer = self._rows(self.weight), self._packer
        if len(self._blocks) == len(shards):
            parts = [self._blocks[i] for i in range(len(shards))]
            self.saved_bytes = self.weight.nbytes - sum(part.rows.nbytes for part in parts)
            self.use(pack_blocks(packer.blocks, parts, self.bias, self.weight.dtype, packer.device))
            return
        for i, blocks in self._blocks.items():  # the other shards are not blocks
            shards[i].copy_(blocks.dequantized(shards[i].dtype))
        if self._stored and packer.from_parts is not None:
            parts = [self._stored.get(i, rows) for i, rows in enumerate(shards)]
            multiply = packer.from_parts(parts, self.bias, release=self._release)
        else:
            multiply = packer.pack(self.weight.to(packer.device), self.bias)
        for values in self._stored.values():
            release_mapped(values)  # once more, since pieces need not end at a page
        self.use(multiply)

    def use(self, multiply: Multiply) -> None:
        """Makes `multiply`, which holds the packed weight, compute the products from now on."""
        self._multiply = multiply
        self._weight, self._stored, self._blocks = None, {}, {}

    @property
    def packed(self) -> Multiply:
        """The function that multiplies by the packed weight, once all its values are there."""
        return self._multiply

    @property
    def can_restore(self) -> bool:
        return self._packer.from_arrays is not None

    @property
    def arrays(self) -> dict[str, torch.Tensor]:
        """The packed weight, for `restored`."""
        return self._multiply.arrays  # type: ignore[attr-defined]

    def restored(self, arrays: dict[str, torch.Tensor]) -> Multiply:
        """Returns for `use` what `pack` would make, if `arrays` are those of an equal layer.

        Raises ValueError or KeyError for others. Requires `can_restore`.
        """
        if self._packer.from_arrays is None:
            raise ValueError("these kernels cannot be made from arrays")
        return self._packer.from_arrays(
            arrays, tuple(self.weight.shape), self.weight.dtype, self.bias
        )

    def _release(self, rows: torch.Tensor) -> None:
        """Releases the pages of packed rows that lie in a mapped file."""
        if any(
            values.data_ptr() <= rows.data_ptr() < values.data_ptr() + values.nbytes
            for values in self._stored.values()
        ):
            release_mapped(rows)

    def _rows(self, of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of each shard."""
        return of.split(list(self.shards.values()))

    def weights(self, prefix: str) -> Weights:
        biases = None if self.bias is None else self._rows(self.bias)
        for i, (name, rows) in enumerate(zip(self.shards, self._rows(self.weight))):
            part = self._parts[i] if self._parts else None
            yield f"{prefix}{name}.weight", Weight(rows, self, i, part)
            if biases is not None:
                # of a weight's rows, not of its columns
                is_of_rows = isinstance(part, RowOrder) or (
                    isinstance(part, Slice) and not part.dim
                )
                of_bias = part if is_of_rows else None
                yield f"{prefix}{name}.bias", Weight(biases[i], self, i, of_bias)


class RowLinear(Linear):
    """A linear layer whose inputs are spread over the ranks. Where the kernel returns fp32, the
    products of the parts are added in fp32 before they are rounded.
    """

    def __init__(
        self,
        shards: dict[str, int],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        packer: Packer,
        part: Slice | ColumnOrder,
        group: TensorGroup,
        adapters: LinearAdapters | None = None,
    ):
        super().__init__(shards, weight, bias, packer, adapters, [part])
        self._group = group

    def pack(self) -> None:
        """See Linear. Only the first rank adds the bias."""
        if self._group.rank and self.bias is not None:
            self.bias.zero_()
        super().pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, this rank's in_features] -> [T, out_features], the same on all ranks"""
        return self._group.all_reduce(self._in_fp32(x, is_logits=False), x.dtype)


class TiedHead(Linear):
    """An output head whose weight is the embedding's table.

    One memory serves both if the packed weight can return rows.
    """

    def __init__(
        self,
        name: str,
        embedding: Embedding,
        packer: Packer,
        adapters: LinearAdapters | None = None,
    ):
        super().__init__({name: len(embedding.weight)}, embedding.weight, None, packer, adapters)
        self.tied_to = embedding
        self._use_as_table = embedding.read_from

    def use(self, multiply: Multiply) -> None:
        super().use(multiply)
        look_up = getattr(multiply, "embedding", None)
        if look_up is not None:
            self._use_as_table(look_up)


class Embedding:
    """The table of an embedding, and the output head that has the same weight, if there is one."""

    tied_to = None

    def __init__(
        self,
        name: str,
        weight: torch.Tensor,
        ops: Any,
        tie: Callable[[Embedding], TiedHead] | None = None,
        adapters: EmbeddingAdapters | None = None,
        part: Slice | None = None,
    ):
        """tie: makes the head. adapters: those of LoRA. part: what this rank keeps, if not all."""
        self.name = name
        self._weight: torch.Tensor | None = weight  # None where rows are read from a packed weight
        self._embedding = ops.embedding
        self._pack_blocks = ops.pack_gguf_linear
        self._look_up: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.saved_bytes = 0  # by blocks that are kept
        self.adapters = adapters
        self._part = part
        self.tied_head = None if tie is None else tie(self)

    @property
    def weight(self) -> torch.Tensor:
        """[vocab_size, hidden_size], unless it is packed."""
        if self._weight is None:
            raise RuntimeError("the embedding's rows are read from a packed weight")
        return self._weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]"""
        y = self._rows(token_ids)
        if self.adapters is not None:
            self.adapters.add(y, token_ids)
        return y

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> the rows of the table [T, hidden_size]"""
        if self._look_up is None:
            return self._embedding(token_ids, self.weight)
        return self._look_up(token_ids)

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
        """Fills the table, if no tied head holds it. Blocks of a GGUF file are kept."""
        if isinstance(values, PackedRows):
            packed = pack_blocks(self._pack_blocks, [values], None, tensor.dtype, tensor.device)
            self.saved_bytes = tensor.nbytes - values.rows.nbytes
            self.read_from(packed.embedding)
        else:
            copy_mapped(tensor, values)

    def use(self, weight: torch.Tensor) -> None:
        """Makes `weight`, of the same shape, the table. Nothing writes to it."""
        self._weight = weight

    def read_from(self, look_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Makes `look_up` return the rows of tokens from now on."""
        self._look_up = look_up
        self._weight = None

    def weights(self, prefix: str) -> Weights:
        weight = Weight(self.weight, self.tied_head or self, part=self._part)
        yield f"{prefix}{self.name}.weight", weight


class MappedTable(Embedding):
    """A table that stays in the file that it comes from, if that has the model's dtype. A step
    reads few of its rows, and the system keeps those that are often read. The file must not change.
    """

    def __init__(self, name: str, weight: torch.Tensor, ops: Any, is_part: bool = False):
        """is_part: tokens that the table does not have get its first row."""
        super().__init__(name, weight, ops)
        if is_part:
            self._embedding = partial(ops.embedding, first_if_absent=True)

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
        kind = tensor.dtype, tensor.device
        if isinstance(values, PackedRows) or (values.dtype, values.device) != kind:
            super().fill(tensor, values)
            return
        self.saved_bytes = tensor.nbytes
        self.use(values)


class PartEmbedding(Embedding):
    """The rows of a part of the table. Every rank has its adapters whole."""

    def __init__(
        self,
        name: str,
        weight: torch.Tensor,
        ops: Any,
        tie: Callable[[Embedding], TiedHead] | None,
        part: Slice,
        group: TensorGroup,
        adapters: EmbeddingAdapters | None = None,
    ):
        super().__init__(name, weight, ops, tie, adapters, part)
        self._begin, self._count, self._group = part.begin, len(weight), group

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size], the same on all ranks"""
        if is_recording():
            part = super()._rows(part_ids(token_ids, self._begin))
        else:
            rows = token_ids - self._begin
            is_elsewhere = (rows < 0) | (rows >= self._count)
            found = super()._rows(rows.masked_fill(is_elsewhere, 0))
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
