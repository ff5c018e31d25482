"""Linear layers on blocks of GGUF files and on those of int4 checkpoints, and embedding look-ups in
them.

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

from ...registry import register
from .calls import BlockLayout, EmbeddingInt8, Epilogue, Op, QuantizedLinear, Step
from .library import library
from .linear import Release
from .program import empty, num_rows, submit
from .tensors import DTYPES, PRIORITY, as_matrix, is_native
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
    "Q4_K": Layout(144, 256, (16, 144), ((0, 2, 2), (2, 4, 2), (4, 16, 4))),
    "Q5_K": Layout(176, 256, (16, 176), ((0, 2, 2), (2, 4, 2), (4, 16, 4))),
    "Q6_K": Layout(210, 256, (0, 192), ((192, 208, 4), (208, 210, 2))),
}


class PackedBlocks:
    """Blocks of one type in panels. parts: [rows, bytes] each, stacked. release: called with rows
    of the parts once they are packed.
    """

    def __init__(self, parts: Sequence[Tensor], type: str, release: Release):
        self.type, layout = type, LAYOUTS[type]
        num_blocks = parts[0].shape[1] // layout.num_bytes
        self.rows, self.in_features = sum(map(len, parts)), num_blocks * layout.columns
        begin, end = layout.numbers
        self.numbers, self.scales = (
            empty_weight(-(-self.rows // _PANEL), num_blocks, _PANEL * size, dtype=torch.uint8)
            for size in (end - begin, layout.num_bytes - (end - begin))
        )
        addresses = torch.cat(
            [torch.arange(len(part)) * part.stride(0) + part.data_ptr() for part in parts]
        )
        file_layout = BlockLayout(
            layout.num_bytes, layout.numbers, len(layout.scales), layout.scales
        )
        most = max(1, _PIECE_BYTES // (_PANEL * num_blocks * layout.num_bytes)) * _PANEL
        starts = [0, *accumulate(map(len, parts))]
        for first in range(0, self.rows, most):
            end, panel = min(first + most, self.rows), first // _PANEL
            library.pack_blocks(
                addresses[first:].data_ptr(),
                end - first,
                num_blocks,
                file_layout,
                self.numbers[panel:].data_ptr(),
                self.scales[panel:].data_ptr(),
            )
            for part, start in zip(parts, starts):
                if len(packed := part[max(0, first - start) : max(0, end - start)]):
                    release(packed)


class PackedGgufLinear:
    """y = x W^T + b for a weight whose rows are blocks, in parts of several types.

    The bits of a row do not depend on the rows beside it.
    """

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
        self.parts = [PackedBlocks(*part, release) for part in _joined(parts, types)]
        self.in_features = self.parts[0].in_features
        self.out_features = sum(part.rows for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""
        return self._multiply(x, self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] fp32, without rounding to dtype"""
        return self._multiply(x, torch.float32)

    @property
    def can_gate(self) -> bool:
        return len(self.parts) == 1 and self.out_features % (2 * _PANEL) == 0

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out / 2]: `silu_and_mul` of a plain call's result, bit for bit.

        Requires `can_gate`.
        """
        return self._multiply(x, self.dtype, Epilogue.GATED)

    def embedding(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, in]: rows of the weight, rounded to dtype. For a weight of one type."""
        [part] = self.parts
        if token_ids.dtype != torch.int32:
            token_ids = token_ids.int()
        out = empty(len(token_ids), self.in_features, dtype=self.dtype)
        call = EmbeddingInt8(
            Op[f"EMBEDDING_{part.type}"],
            DTYPES[self.dtype],
            num_rows(token_ids),
            part.numbers.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            part.rows,
            self.in_features,
            scales=part.scales.data_ptr(),
        )
        submit(call, Step(token_ids=token_ids.data_ptr()))
        return out

    def _multiply(
        self, x: Tensor, out_dtype: torch.dtype, epilogue: Epilogue = Epilogue.PLAIN
    ) -> Tensor:
        x = as_matrix(x)
        columns = self.out_features // (2 if epilogue.is_gated else 1)
        out, first = empty(x.shape[0], columns, dtype=out_dtype), 0
        for part in self.parts:
            bias = None if self.bias is None else self.bias[first:].data_ptr()
            call = QuantizedLinear(
                Op[f"LINEAR_{part.type}"],
                DTYPES[x.dtype],
                num_rows(x),
                x.data_ptr(),
                part.numbers.data_ptr(),
                bias,
                out.data_ptr() + first * out_dtype.itemsize,
                x.stride(0),
                columns,
                self.in_features,
                part.rows,
                epilogue,
                DTYPES[out_dtype],
                scales=part.scales.data_ptr(),
            )
            submit(call)
            first += part.rows
        return out


@register("pack_gguf_linear", name="native", predicate=is_native, priority=PRIORITY)
def pack_gguf_linear(
    parts: list[Tensor], types: list[str], bias: Tensor | None, dtype: torch.dtype
) -> PackedGgufLinear:
    return PackedGgufLinear(parts, types, bias, dtype)


pack_gguf_linear.from_parts = PackedGgufLinear


def _joined(parts: Sequence[Tensor], types: Sequence[str]) -> list[tuple[list[Tensor], str]]:
    """Groups neighbours of one type."""
    joined: list[tuple[list[Tensor], str]] = []
    for part, type in zip(parts, types, strict=True):
        if joined and joined[-1][1] == type:
            joined[-1][0].append(as_matrix(part))
        else:
            joined.append(([as_matrix(part)], type))
    return joined
