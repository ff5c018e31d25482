"""Linear layers, embeddings and the output head that is one of them.

Must not know: architectures, files, requests, how weights are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..device import copy_mapped, release_mapped
from ..weights.packed_rows import PackedRows, pack_blocks
from .adapters import EmbeddingAdapters, LinearAdapters

# (name in the checkpoint, the tensor it fills: a whole parameter, or a view of a merged one's rows)
Weights = Iterator[tuple[str, torch.Tensor]]
Multiply = Callable[[torch.Tensor], torch.Tensor]
# ops.pack_linear or ops.pack_quantized_linear with its bits, and its `from_parts` and `from_arrays`
# if the implementation has them (see the contract of pack_linear)
Packer = tuple[
    Callable[..., Multiply],
    Callable[..., Multiply] | None,
    Callable[..., Multiply] | None,
]


def _not_packed(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a linear layer is called before all its weights are there")


class Linear:
    """y = x W^T + b, for one or several stacked projections of the same x (q, k and v; gate and
    up).
    """

    def __init__(
        self,
        shards: dict[str, int],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        packer: Packer,
    ):
        self.shards = shards  # name in the checkpoint -> rows, in order
        self._weight: torch.Tensor | None = weight  # None once packed
        self.bias = bias
        self._num_unfilled = len(shards) * (1 if bias is None else 2)
        self._pack, self._pack_parts, self._from_arrays = packer
        # shards kept unpacked until all are there, by the address of their rows in `weight`
        self._stored: dict[int, torch.Tensor] = {}
        self._blocks: dict[int, PackedRows] = {}  # the same for blocks of a GGUF file
        # ops.pack_gguf_linear, if blocks of these types are to be multiplied as they are
        self.pack_blocks: Callable[..., Multiply] | None = None
        self.saved_bytes = 0  # by blocks that are kept
        self._multiply: Multiply = _not_packed
        self.takes_adapters = True  # of LoRA
        self.adapters: LinearAdapters | None = None

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
        """The operation of that name on this layer's result, in one pass with the same bits; None:
        there is none. Ask when the weight is packed.
        """
        multiply: Any = self._multiply
        if self.adapters is not None:
            return None
        return multiply.silu_and_mul if getattr(multiply, "can_gate", False) else None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in_features] -> [R, sum of rows] f32"""
        multiply = getattr(self._multiply, "logits", None)
        y = self._multiply(x).float() if multiply is None else multiply(x)
        if self.adapters is not None:
            self.adapters.add(y, x, is_logits=True)
        return y

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
        """Fills one tensor of `weights`; call it once for each. See LayerFactory.fill.

        The last call packs the weight.
        """
        is_shard = tensor.dim() == 2
        if isinstance(values, PackedRows):
            self._blocks[tensor.data_ptr()] = values
        elif (
            is_shard
            and self._pack_parts is not None
            and (values.dtype, values.device) == (tensor.dtype, tensor.device)
        ):
            self._stored[tensor.data_ptr()] = values
        else:
            copy_mapped(tensor, values)
        self._num_unfilled -= 1
        if not self._num_unfilled:
            self.pack()

    def pack(self) -> None:
        """Packs the weight into the layout that the device multiplies best. Call it once, when all
        values are there.
        """
        shards = [rows for _, rows in self.weights("") if rows.dim() == 2]
        if self.pack_blocks is not None and len(self._blocks) == len(shards):
            parts = [self._blocks[rows.data_ptr()] for rows in shards]
            self.saved_bytes = self.weight.nbytes - sum(part.rows.nbytes for part in parts)
            self.use(pack_blocks(self.pack_blocks, parts, self.bias, self.weight.dtype))
            return
        for rows in shards:  # the other shards are no blocks
            if (blocks := self._blocks.pop(rows.data_ptr(), None)) is not None:
                rows.copy_(blocks.dequantized(rows.dtype))
        if self._stored and self._pack_parts is not None:
            multiply = self._pack_parts(
                [self._stored.get(rows.data_ptr(), rows) for rows in shards],
                self.bias,
                release=self._release,
            )
        else:
            multiply = self._pack(self.weight, self.bias)
        for values in self._stored.values():
            release_mapped(values)  # again, for pieces that do not end at a page
        self.use(multiply)

    def use(self, multiply: Multiply) -> None:
        """Makes `multiply`, which holds the packed weight, compute the products from now on."""
        self._multiply = multiply
        self._weight, self._stored, self._blocks = None, {}, {}

    @property
    def packed(self) -> Multiply:
        """What multiplies by the packed weight, once all its values are there."""
        return self._multiply

    @property
    def can_restore(self) -> bool:
        return self._from_arrays is not None

    @property
    def arrays(self) -> dict[str, torch.Tensor]:
        """The packed weight, for `restored`."""
        return self._multiply.arrays  # type: ignore[attr-defined]

    def restored(self, arrays: dict[str, torch.Tensor]) -> Multiply:
        """For `use`: what `pack` would make if `arrays` are those of an equal layer.

        Raises ValueError or KeyError for others. Requires `can_restore`.
        """
        if self._from_arrays is None:
            raise ValueError("these kernels cannot be made from arrays")
        return self._from_arrays(arrays, tuple(self.weight.shape), self.weight.dtype, self.bias)

    def _release(self, rows: torch.Tensor) -> None:
        """Releases the pages of a packed shard that lies in a mapped file."""
        if any(
            values.data_ptr() <= rows.data_ptr() < values.data_ptr() + values.nbytes
            for values in self._stored.values()
        ):
            release_mapped(rows)

    def weights(self, prefix: str) -> Weights:
        start = 0
        for name, rows in self.shards.items():
            yield f"{prefix}{name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + rows]
            start += rows


class TiedHead(Linear):
    """An output head whose weight is the embedding's table.

    One memory serves both if the packed weight can return rows.
    """

    def __init__(self, name: str, embedding: Embedding, packer: Packer):
        super().__init__({name: len(embedding.weight)}, embedding.weight, None, packer)
        self.tied_to = embedding

    def use(self, multiply: Multiply) -> None:
        super().use(multiply)
        look_up = getattr(multiply, "embedding", None)
        if look_up is not None:
            self.tied_to.read_from(look_up)


class Embedding:
    def __init__(self, name: str, weight: torch.Tensor, ops: Any):
        self.name = name
        self._weight: torch.Tensor | None = weight  # None where rows are read from a packed weight
        self._embedding = ops.embedding
        self._pack_blocks = ops.pack_gguf_linear
        self._look_up: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.saved_bytes = 0  # by blocks that are kept
        self.adapters: EmbeddingAdapters | None = None  # of LoRA

    @property
    def weight(self) -> torch.Tensor:
        """[vocab_size, hidden_size], unless it is packed."""
        if self._weight is None:
            raise RuntimeError("the embedding's rows are read from a packed weight")
        return self._weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]"""
        y = (
            self._embedding(token_ids, self.weight)
            if self._look_up is None
            else self._look_up(token_ids)
        )
        if self.adapters is not None:
            self.adapters.add(y, token_ids)
        return y

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
        """Fills the table, which no tied head holds. Blocks of a GGUF file are kept."""
        if isinstance(values, PackedRows):
            packed = pack_blocks(self._pack_blocks, [values], None, tensor.dtype)
            self.saved_bytes = tensor.nbytes - values.rows.nbytes
            self.read_from(packed.embedding)
        else:
            copy_mapped(tensor, values)

    def use(self, weight: torch.Tensor) -> None:
        """Makes `weight`, of the same shape, the table. It is not written to."""
        self._weight = weight

    def read_from(self, look_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Makes `look_up` return the rows of tokens from now on."""
        self._look_up = look_up
        self._weight = None

    def weights(self, prefix: str) -> Weights:
        yield f"{prefix}{self.name}.weight", self.weight
