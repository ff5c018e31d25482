"""Sums and joins what the ranks of a machine have computed, as operations of the library.

Must not know: models, requests, how ranks are started, what else they say to each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .calls import LINE_BYTES, AllGather, AllReduce, Op
from .program import empty, run_call
from .recorder import Unrecordable
from .tensors import DTYPES, as_matrix


def header_bytes(num_ranks: int) -> int:
    """Returns the size of what precedes the ranks' parts in their memory, as in src/abi_ranks.h."""
    return -(-LINE_BYTES * (1 + num_ranks) // 4096) * 4096


def memory_bytes(num_ranks: int, part_floats: int) -> int:
    """Returns the size of what the ranks of a group share."""
    return header_bytes(num_ranks) + 2 * num_ranks * part_floats * 4


class NativeExchange:
    """A rank's end of what a group shares. Only one in a process may run: its runs do not overlap,
    so two would wait for each other.
    """

    def __init__(
        self,
        memory: Tensor,
        rank: int,
        num_ranks: int,
        part_floats: int,
        awake_s: float,
        timeout_s: float,
    ):
        """memory [memory_bytes] u8, zeros at first. A rank that waits polls for awake_s before it
        sleeps, and the run fails if another one does not come for timeout_s.
        """
        self._sequence = ctypes.c_int64(0)
        self._part_floats = part_floats
        self._ends = {
            "memory": memory,
            "sequence": ctypes.addressof(self._sequence),
            "rank": rank,
            "num_ranks": num_ranks,
            "part_floats": part_floats,
            "awake_ns": int(awake_s * 1e9),
            "timeout_ns": int(timeout_s * 1e9),
        }
        # These are the starts of joins. They are kept because calls hold their addresses.
        self._starts: dict[tuple[int, ...], ctypes.Array] = {}

    def all_reduce(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [T, N] of each rank -> [T, N] of dtype: the sum, in fp32 and in the order of ranks,
        rounded once.
        """
        self._check(x.shape[-1])
        x = as_matrix(x)
        out = empty(*x.shape, dtype=dtype)
        run_call(
            AllReduce,
            Op.ALL_REDUCE,
            x,
            dtype=DTYPES[dtype],
            **self._ends,
            x=x,
            out=out,
            size=x.shape[1],
            x_dtype=DTYPES[x.dtype],
        )
        return out

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [R, widths[rank]] of each rank -> [R, sum of widths] of its dtype, side by side."""
        self._check(*widths)
        x = as_matrix(x)
        key = tuple(accumulate(widths, initial=0))
        if key not in self._starts:
            self._starts[key] = (ctypes.c_int64 * len(key))(*key)
        out = empty(len(x), key[-1], dtype=x.dtype)
        run_call(
            AllGather,
            Op.ALL_GATHER,
            x,
            **self._ends,
            x=x,
            out=out,
            starts=ctypes.addressof(self._starts[key]),
            size=key[-1],
        )
        return out

    def _check(self, *row_floats: int) -> None:
        if not all(0 < count <= self._part_floats for count in row_floats):
            raise Unrecordable(
                f"ranks exchange rows of 1 to {self._part_floats} numbers, not {row_floats}"
            )
