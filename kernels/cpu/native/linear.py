"""Linear layers of the native library, whose weights are packed once.

Must not know: models, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...registry import register
from .calls import Embedding, Epilogue, Linear, Op, Step
from .library import library
from .program import empty, num_rows, submit
from .tensors import DTYPES, PRIORITY, as_matrix, is_native
from .weights import empty_weight

_PANEL = 16  # outputs whose weights are stored together (src/abi.h: quire_pack_linear)
_PIECE_BYTES = 16 * 2**20  # of a weight, packed between two calls of `release`

Release = Callable[[Tensor], Any]


class PackedLinear:
    """y = x W^T + b for a bf16 or fp32 weight that does not change.

    The bits of a row do not depend on the rows beside it.
    """

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

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""
        return self._multiply(x, self.out_features, Epilogue.PLAIN, self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] fp32, without rounding to dtype"""
        return self._multiply(x, self.out_features, Epilogue.PLAIN, torch.float32)

    @property
    def can_gate(self) -> bool:
        return self.out_features % (2 * _PANEL) == 0

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out / 2]: `silu_and_mul` of a plain call's result, bit for bit.

        Requires `can_gate`.
        """
        return self._multiply(x, self.out_features // 2, Epilogue.GATED, self.dtype)

    def embedding(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, in]: the operation `embedding` on the packed weight."""
        if token_ids.dtype != torch.int32:
            token_ids = token_ids.int()
        out = empty(len(token_ids), self.in_features, dtype=self.dtype)
        call = Embedding(
            Op.EMBEDDING_PACKED,
            DTYPES[self.dtype],
            num_rows(token_ids),
            self.weight.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            self.out_features,
            self.in_features,
        )
        submit(call, Step(token_ids=token_ids.data_ptr()))
        return out

    def _multiply(
        self, x: Tensor, columns: int, epilogue: Epilogue, out_dtype: torch.dtype
    ) -> Tensor:
        x = as_matrix(x)
        out = empty(x.shape[0], columns, dtype=out_dtype)
        call = Linear(
            Op.LINEAR,
            DTYPES[x.dtype],
            num_rows(x),
            x.data_ptr(),
            self.weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            columns,
            self.in_features,
            self.out_features,
            epilogue,
            DTYPES[out_dtype],
        )
        submit(call)
        return out


@register("pack_linear", name="native", predicate=is_native, priority=PRIORITY)
def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return PackedLinear([weight], bias)


pack_linear.from_parts = PackedLinear


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
