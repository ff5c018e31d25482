"""Implements linear layers on blocks of GGUF files and on those of int4 checkpoints, and embedding
look-ups in them.

Must not know: files, models, requests.

kernels/reference/gguf_linear.py specifies the arithmetic, src/gguf_types.inl the layout: panels of
16 outputs hold the file's bytes in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...registry import register, with_forms
from .calls import BlockLayout
from .library import library
from .linear import NativeLinear, PackedRows, Release
from .tensors import PRIORITY, as_matrix, is_native
from .weights import empty_weight

_PANEL = 16
_PIECE_BYTES = 16 * 2**20  # of rows that are packed before they are released


class Layout(NamedTuple):
    """Where a block's parts are in the file, in bytes; `scales` in the order that kernels read
    them, each as (begin, end, bytes that an output has in sequence).
    """

    num_bytes: int
    columns: int
    numbers: tuple[int, int]
    scales: tuple[tuple[int, int, int], ...]


LAYOUTS = {
    "Q8_0": Layout(34, 32, (2, 34), ((0, 2, 2),)),
    "Q4_0": Layout(18, 32, (2, 18), ((0, 2, 2),)),
    "Q4_1": Layout(20, 32, (4, 20), ((0, 2, 2), (2, 4, 2))),
    "Q5_0": Layout(22, 32, (2, 22), ((0, 2, 2),)),
    "Q5_1": Layout(24, 32, (4, 24), ((0, 2, 2), (2, 4, 2))),
    "IQ4_NL": Layout(18, 32, (2, 18), ((0, 2, 2),)),
    "MXFP4": Layout(17, 32, (1, 17), ((0, 1, 1),)),
    "INT4_32": Layout(20, 32, (4, 20), ((0, 4, 4),)),
    "INT4_128": Layout(68, 128, (4, 68), ((0, 4, 4),)),
    "INT2_64": Layout(18, 64, (2, 18), ((0, 2, 2),)),
    "INT2_128": Layout(34, 128, (2, 34), ((0, 2, 2),)),
    "Q4_K": Layout(144, 256, (16, 144), ((0, 2, 2), (2, 4, 2), (4, 16, 4))),
    "Q5_K": Layout(176, 256, (16, 176), ((0, 2, 2), (2, 4, 2), (4, 16, 4))),
    "Q6_K": Layout(210, 256, (0, 192), ((192, 208, 4), (208, 210, 2))),
}


def pack_blocks(parts: Sequence[Tensor], type: str, release: Release) -> PackedRows:
    """Packs blocks of one type, parts [rows, bytes] stacked, in panels. `release` is called with
    rows of the parts once they are packed.
    """
    layout = LAYOUTS[type]
    rows, num_blocks = sum(map(len, parts)), parts[0].shape[1] // layout.num_bytes
    begin, end = layout.numbers
    numbers, scales = (
        empty_weight(-(-rows // _PANEL), num_blocks, _PANEL * size, dtype=torch.uint8)
        for size in (end - begin, layout.num_bytes - (end - begin))
    )
    addresses = torch.cat(
        [torch.arange(len(part)) * part.stride(0) + part.data_ptr() for part in parts]
    )
    file_layout = BlockLayout(
        num_bytes=layout.num_bytes,
        numbers=layout.numbers,
        num_scales=len(layout.scales),
        scales=layout.scales,
    )
    most = max(1, _PIECE_BYTES // (_PANEL * num_blocks * layout.num_bytes)) * _PANEL
    starts = [0, *accumulate(map(len, parts))]
    for first in range(0, rows, most):
        end, panel = min(first + most, rows), first // _PANEL
        library.pack_blocks(
            addresses[first:].data_ptr(),
            end - first,
            num_blocks,
            file_layout,
            numbers[panel:].data_ptr(),
            scales[panel:].data_ptr(),
        )
        for part, start in zip(parts, starts):
            if len(packed := part[max(0, first - start) : max(0, end - start)]):
                release(packed)
    return PackedRows(type, rows, num_blocks * layout.columns, numbers, scales)


class PackedGgufLinear(NativeLinear):
    """A linear layer whose weight's rows are blocks, in parts of several types."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        types: Sequence[str],
        bias: Tensor | None,
        dtype: torch.dtype,
        release: Release = lambda rows: None,
    ):
        """parts [n, bytes] uint8, stacked, are the weight's rows; each has a type."""
        self.dtype, self.bias = dtype, None if bias is None else bias.contiguous()
        self._parts = [pack_blocks(*part, release) for part in _joined(parts, types)]
        self.in_features = self.parts[0].in_features
        self.out_features = sum(part.rows for part in self.parts)

    @property
    def parts(self) -> list[PackedRows]:
        return self._parts


@register("pack_gguf_linear", name="native", predicate=is_native, priority=PRIORITY)
@with_forms(from_parts=PackedGgufLinear)
def pack_gguf_linear(
    parts: list[Tensor], types: list[str], bias: Tensor | None, dtype: torch.dtype
) -> PackedGgufLinear:
    return PackedGgufLinear(parts, types, bias, dtype)


def _joined(parts: Sequence[Tensor], types: Sequence[str]) -> list[tuple[list[Tensor], str]]:
    """Groups neighbours of one type."""
    joined: list[tuple[list[Tensor], str]] = []
    for part, type in zip(parts, types, strict=True):
        if joined and joined[-1][1] == type:
            joined[-1][0].append(as_matrix(part))
        else:
            joined.append(([as_matrix(part)], type))
    return joined
