"""Implements linear layers by the native library. Their weights are packed once.

Must not know: models, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...registry import register, with_forms
from .calls import (
    Absent,
    Embedding,
    EmbeddingInt8,
    Epilogue,
    Ids,
    Linear,
    Op,
    QuantizedLinear,
    Step,
    is_gated,
)
from .library import library
from .program import empty, run_call
from .tensors import DTYPES, PRIORITY, as_matrix, is_native
from .weights import empty_weight

_PANEL = 16  # outputs whose weights are stored together (src/abi.h: quire_pack_linear)
_PIECE_BYTES = 16 * 2**20  # of a weight, packed between two calls of `release`

Release = Callable[[Tensor], Any]


@dataclass
class PackedRows:
    """Rows of a weight as the library reads them."""

    type: str | None  # that operations name, as LINEAR_INT8 and EMBEDDING_INT8; None: not quantized
    rows: int
    in_features: int
    numbers: Tensor
    scales: Tensor | None


class NativeLinear:
    """y = x W^T + b for a packed weight, whose rows may be in parts of several types.

    The bits of a row do not depend on the rows beside it.
    """

    dtype: torch.dtype
    bias: Tensor | None
    in_features: int
    out_features: int

    @property
    def parts(self) -> Sequence[PackedRows]:
        raise NotImplementedError

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
        """[T] -> [T, in]: rows of the weight, rounded to dtype. It is for a weight of one type that
        has the operation.
        """
        [part] = self.parts
        if token_ids.dtype != torch.int32:
            token_ids = token_ids.int()
        out = empty(len(token_ids), self.in_features, dtype=self.dtype)
        run_call(
            Embedding if part.scales is None else EmbeddingInt8,
            Op[f"EMBEDDING_{part.type or 'PACKED'}"],
            token_ids,
            Step(token_ids=token_ids.data_ptr()),
            dtype=DTYPES[self.dtype],
            table=part.numbers,
            out=out,
            num_ids=part.rows,
            size=self.in_features,
            ids=Ids.TOKEN_IDS,
            first_id=0,  # the recorder knows parts of a table
            absent=Absent.ABSENT_NAN,
            **_scales(part),
        )
        return out

    def _multiply(
        self, x: Tensor, out_dtype: torch.dtype, epilogue: Epilogue = Epilogue.PLAIN
    ) -> Tensor:
        x = as_matrix(x)
        columns = self.out_features // (2 if is_gated(epilogue) else 1)
        out, first = empty(x.shape[0], columns, dtype=out_dtype), 0
        for part in self.parts:
            run_call(
                Linear if part.scales is None else QuantizedLinear,
                Op.LINEAR if part.type is None else Op[f"LINEAR_{part.type}"],
                x,
                x=x,
                weight=part.numbers,
                bias=None if self.bias is None else self.bias[first:],
                out=out.data_ptr() + first * out_dtype.itemsize,
                out_row=columns,
                in_features=self.in_features,
                out_features=part.rows,
                epilogue=epilogue,
                out_dtype=DTYPES[out_dtype],
                gate_scale=0.0,
                gate_limit=0.0,
                **_scales(part),
            )
            first += part.rows
        return out


def _scales(part: PackedRows) -> dict[str, Tensor]:
    """Returns the field of the structs that have scales."""
    return {} if part.scales is None else {"scales": part.scales}


class PackedLinear(NativeLinear):
    """A linear layer with a bf16 or fp32 weight that does not change."""

    def __init__(
        self, parts: Sequence[Tensor], bias: Tensor | None, release: Release | None = None
    ):
        """parts [n, in], stacked, are the weight [out, in]; bias [out] has the same dtype.

        The weight is copied; the bias is kept. `release` is called with rows of the parts once they
        are packed.
        """
        self.out_features, self.in_features = sum(map(len, parts)), parts[0].shape[1]
        self.dtype = parts[0].dtype
        self.bias = None if bias is None else bias.contiguous()
        self._pack(parts, release)

    def _pack(self, parts: Sequence[Tensor], release: Release | None) -> None:
        """Packs to [panels, lines, 16, numbers of 4 bytes], padded with zeros."""
        per_line = 4 // self.dtype.itemsize
        shape = -(-self.out_features // _PANEL), -(-self.in_features // per_line), _PANEL, per_line
        self.weight = empty_weight(*shape, dtype=self.dtype)
        for panel, part in by_panel(parts, release):
            packed = self.weight[panel].data_ptr()
            library.pack_linear(
                part.data_ptr(),
                part.stride(0),
                DTYPES[self.dtype],
                len(part),
                self.in_features,
                packed,
            )

    @property
    def parts(self) -> list[PackedRows]:
        return [PackedRows(None, self.out_features, self.in_features, self.weight, None)]


@register("pack_linear", name="native", predicate=is_native, priority=PRIORITY)
@with_forms(from_parts=PackedLinear)
def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return PackedLinear([weight], bias)


def by_panel(
    parts: Sequence[Tensor], release: Release | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yields matrices that each begin with a panel, and the index of that panel.

    Parts that do not begin with a panel are joined first. When the next matrix is requested,
    `release` receives the one before.
    """
    if any(len(part) % _PANEL for part in parts[:-1]):
        parts = [torch.cat(list(parts))]
    panel = 0
    for part in parts:
        size = max(1, _PIECE_BYTES // (_PANEL * part[0].nbytes)) * _PANEL
        for piece in part.split(size):
            yield panel, as_matrix(piece)
            panel += len(piece) // _PANEL
            if release is not None:
                release(piece)
