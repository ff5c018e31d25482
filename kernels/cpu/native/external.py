"""Runs functions of plugins, compiled with include/quire/plugin.h, as native kernels. Threads share
their rows, and a model that calls them is recorded like one of built-in kernels.

Must not know: what a function computes, models, requests.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .calls import External, Op
from .program import empty, run_call
from .tensors import DTYPES

OTHER = 2  # the dtype of a tensor that is neither bf16 nor fp32
MAX_TENSORS, MAX_NUMBERS = 8, 4


def include_path() -> str:
    """Returns the folder for the compiler's option -I, so that `#include <quire/plugin.h>` is
    found.
    """
    return str(Path(__file__).parent / "include")


class NativeFunction:
    """A `quire_function` of a shared library.

    An implementation that uses it is registered with `is_native=True`, allocates its results with
    `empty`, and computes with nothing else. A model that calls it is then recorded.
    """

    def __init__(self, library: str | os.PathLike[str], symbol: str):
        """Raises OSError if the library cannot be loaded, AttributeError if it lacks the symbol."""
        self._library = ctypes.CDLL(str(library))  # keeps it loaded
        function = ctypes.cast(getattr(self._library, symbol), ctypes.c_void_p).value
        assert function is not None
        self._address = function

    @staticmethod
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        """Allocates a result."""
        return empty(*shape, dtype=dtype)

    def __call__(
        self, rows: Sequence[Tensor], weights: Sequence[Tensor] = (), numbers: Sequence[float] = ()
    ) -> None:
        """Calls the function for all rows of `rows`, tensors [T, size] with contiguous rows that it
        reads or writes. `weights` are contiguous tensors without rows. The function gets `rows`,
        then `weights`, at most eight in all, and at most four `numbers`.

        Raises ValueError for other tensors.
        """
        if not rows or len(rows) + len(weights) > MAX_TENSORS or len(numbers) > MAX_NUMBERS:
            raise ValueError(
                f"a native function takes 1 to {MAX_TENSORS} tensors, one of them with rows, "
                f"and at most {MAX_NUMBERS} numbers, not {len(rows)} + {len(weights)} and "
                f"{len(numbers)}"
            )
        tensors = (*rows, *weights)
        absent = [None] * (MAX_TENSORS - len(tensors))
        for i, tensor in enumerate(tensors):
            _check(i, tensor, len(rows[0]), has_rows=i < len(rows))
        run_call(
            External,
            Op.EXTERNAL,
            rows[0],
            dtype=DTYPES.get(rows[0].dtype, OTHER),
            **{f"data{i}": tensor for i, tensor in enumerate((*tensors, *absent))},
            row=tuple(tensor.stride(0) for tensor in rows),
            size=(*(tensor.shape[1] for tensor in rows), *(tensor.numel() for tensor in weights)),
            tensor_dtype=tuple(DTYPES.get(tensor.dtype, OTHER) for tensor in tensors),
            numbers=tuple(numbers),
            function=self._address,
        )


def _check(index: int, tensor: Tensor, num_rows: int, has_rows: bool) -> None:
    is_laid_out = tensor.stride(-1) == 1 if has_rows else tensor.is_contiguous()
    if (has_rows and (tensor.dim() != 2 or len(tensor) != num_rows)) or not is_laid_out:
        raise ValueError(
            f"tensor {index} has shape {list(tensor.shape)} and strides {tensor.stride()}; rows "
            f"are [{num_rows}, size] with contiguous elements, and weights are contiguous"
        )
