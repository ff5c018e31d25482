"""Rows of blocks, as they lie in a GGUF file or as a quantized checkpoint's weights become them.

Must not know: files, models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...ipc.models.gguf import BLOCK_SIZES, MEMORY_TYPES
from ...ipc.models.quantized_tensors import BLOCKS
from ...kernels.reference.gguf_blocks import dequantize
from ...kernels.reference.gguf_repack import repack
from ..device import copy_mapped, release_mapped
from .table import ColumnOrder, Part, Slice


class PackedRows(NamedTuple):
    rows: torch.Tensor  # [rows, bytes] uint8
    type: str
    is_mapped: bool = False  # whether they lie in a file's private mapping, to be released

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers, [rows, columns]."""
        return dequantize(self.rows, self.type, dtype)

    @property
    def block(self) -> tuple[int, int]:
        """Columns and bytes of a block."""
        return BLOCKS[self.type] if self.type in BLOCKS else BLOCK_SIZES[self.type]

    def can_cut(self, part: Part) -> bool:
        """Whether blocks stay whole in this part, and in those of the other ranks."""
        memory_type = MEMORY_TYPES.get(self.type, self.type)
        columns = max(self.block[0], self._replace(type=memory_type).block[0])
        if isinstance(part, ColumnOrder):
            return part.blocks(columns) is not None
        if not isinstance(part, Slice) or not part.dim:
            return True
        return (part.end - part.begin) % columns == 0

    def kept(self, part: Part) -> PackedRows:
        """The part that a rank keeps. Requires `can_cut`."""
        columns, num_bytes = self.block
        if isinstance(part, ColumnOrder):
            blocks = part.blocks(columns)
            assert blocks is not None
            kept = self.rows.view(len(self.rows), -1, num_bytes)[:, blocks]
            return PackedRows(kept.flatten(1), self.type)
        if not isinstance(part, Slice) or not part.dim:
            return PackedRows(part.of(self.rows), self.type)
        begin, end = (place // columns * num_bytes for place in (part.begin, part.end))
        return PackedRows(self.rows[:, begin:end].contiguous(), self.type)

    def for_memory(self) -> PackedRows:
        """Returns blocks of the type in MEMORY_TYPES: the same blocks, or blocks packed again."""
        target = MEMORY_TYPES.get(self.type, self.type)
        return self if target == self.type else PackedRows(repack(self.rows, self.type), target)


def copy_weights(tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
    """Copies `values` into `tensor`, as copy_mapped does, and dequantizes blocks."""
    if isinstance(values, PackedRows):
        tensor.copy_(values.dequantized(tensor.dtype).view(tensor.shape))
    else:
        copy_mapped(tensor, values)


def pack_blocks(
    pack: Callable[..., Any],
    parts: list[PackedRows],
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Packs these rows for `device` by `pack`, which is ops.pack_gguf_linear. If it packs piece by
    piece, pages of a file are released in the same way.
    """
    rows, types = [part.rows.to(device) for part in parts], [part.type for part in parts]
    from_parts = getattr(pack, "from_parts", None)
    if from_parts is None:
        return pack(rows, types, bias, dtype)

    def release(packed: torch.Tensor) -> None:
        if any(
            part.is_mapped and 0 <= packed.data_ptr() - part.rows.data_ptr() < part.rows.nbytes
            for part in parts
        ):
            release_mapped(packed)

    return from_parts(rows, types, bias, dtype, release=release)
