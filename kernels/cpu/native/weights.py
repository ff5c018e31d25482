"""Allocates memory for packed weights and adapters, in huge pages where the system has them.

Must not know: how a weight is packed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ....ipc.platform_tuning import use_huge_pages

_PIECE_BYTES = 32 * 2**20
_HUGE_PAGE_BYTES = 2 * 2**20
_ALIGNMENT = 64


class _Piece:
    """Memory shared by several weights, so that small ones are in huge pages too.

    It lives as long as any of them.
    """

    def __init__(self, memory: mmap.mmap):
        """`memory`: a private mapping, one huge page larger than its contents."""
        use_huge_pages(memory)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        # Unused pages are never touched and take no memory.
        self.start = -whole.data_ptr() % _HUGE_PAGE_BYTES
        self.end = self.start + len(memory) - _HUGE_PAGE_BYTES
        self.memory = weakref.ref(memory)
        self._untaken: mmap.mmap | None = memory  # until a weight holds a part of it

    def take(self, num_bytes: int) -> Tensor | None:
        """Returns None if it is full, or released with its last weight."""
        memory = self.memory()
        if memory is None or self.start + num_bytes > self.end:
            return None
        taken = torch.frombuffer(memory, dtype=torch.uint8, offset=self.start, count=num_bytes)
        self._untaken = None
        self.start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken

    def give_back(self) -> None:
        """Releases the pages that no weight uses, if the system has already mapped them."""
        memory, start = self.memory(), -(-self.start // mmap.PAGESIZE) * mmap.PAGESIZE
        if memory is not None and start < len(memory):
            memory.madvise(mmap.MADV_DONTNEED, start, len(memory) - start)


class HugePages:
    """Allocates tensors one after the other, so that small ones are in huge pages too."""

    def __init__(self) -> None:
        self.last: _Piece | None = None

    def begin(self, piece: _Piece) -> None:
        """The next tensors are placed in `piece`, until it is full."""
        self.last = piece

    def end(self, piece: _Piece) -> None:
        """No more tensors are placed in `piece`."""
        if self.last is piece:
            self.last = None

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised memory, 64-byte aligned. Unless it is early memory, it is zeros."""
        num_bytes = math.prod(shape) * dtype.itemsize
        taken = self.last.take(num_bytes) if self.last is not None else None
        if taken is None:
            memory = mmap.mmap(
                -1,
                max(num_bytes, _PIECE_BYTES) + _HUGE_PAGE_BYTES,
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
            piece = _Piece(memory)
            del memory
            taken = piece.take(num_bytes)
            assert taken is not None  # it is new
            if num_bytes < _PIECE_BYTES:
                self.last = piece
        return taken.view(dtype).view(*shape)


_weights = HugePages()


@contextlib.contextmanager
def early_memory(memory: mmap.mmap | None) -> Iterator[None]:
    """Returns a context in which weights are placed in `memory` until it is full (see
    _Piece.__init__).

    With None weights are allocated as usual. Unused pages are released afterwards.
    """
    if memory is None:
        yield
        return
    piece = _Piece(memory)
    del memory
    _weights.begin(piece)
    try:
        yield
    finally:
        piece.give_back()
        _weights.end(piece)


def empty_weight(*shape: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory, 64-byte aligned."""
    return _weights.empty(*shape, dtype=dtype)
