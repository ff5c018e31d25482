"""Rows of blocks as they lie in a GGUF file, or of a quantized checkpoint's weights.

Must not know: files, models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...ipc.models.gguf_weights import MEMORY_TYPES
from ...kernels.reference.gguf_blocks import dequantize
from ...kernels.reference.gguf_repack import repack
from ..device import copy_mapped


class PackedRows(NamedTuple):
    rows: torch.Tensor  # [rows, bytes] uint8
    type: str

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns]"""
        return dequantize(self.rows, self.type, dtype)

    def for_memory(self) -> PackedRows:
        """As blocks of the type in MEMORY_TYPES: the same, or packed again."""
        target = MEMORY_TYPES.get(self.type, self.type)
        return self if target == self.type else PackedRows(repack(self.rows, self.type), target)


def copy_weights(tensor: torch.Tensor, values: torch.Tensor | PackedRows) -> None:
    """tensor = values, as copy_mapped; blocks are dequantized."""
    if isinstance(values, PackedRows):
        tensor.copy_(values.dequantized(tensor.dtype).view(tensor.shape))
    else:
        copy_mapped(tensor, values)
