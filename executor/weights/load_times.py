"""Reads weights while others are converted, and measures where the time of a load goes.

Must not know: formats, models.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from ...ipc.platform_tuning import read_pages

logger = logging.getLogger(__name__)

_MAPPED_AT_ONCE = 16 * 2**20

Key = TypeVar("Key")


def map_pages(tensor: Tensor) -> None:
    """Maps the pages of a contiguous tensor that lies in a mapping of a file. Of a large tensor it
    maps only the first pages, because all mapped pages count as memory in use.
    """
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + min(tensor.nbytes, _MAPPED_AT_ONCE) - begin
    read_pages(begin, size)


class LoadTimes:
    """Measures one load, from its creation to `log`."""

    def __init__(self) -> None:
        self.num_bytes = 0  # read so far
        self.read_s = self.convert_s = 0.0
        self._start = time.perf_counter()

    def reading(self, tensors: Iterable[tuple[Key, Tensor]]) -> Iterator[tuple[Key, Tensor]]:
        """Yields the same pairs, whose tensors lie in mappings of files. While one is converted, a
        thread reads the next. Only the time spent waiting for it counts as reading.
        """
        waiting: tuple[Key, Tensor, Future[None]] | None = None
        with ThreadPoolExecutor(1, "quire-read") as thread:
            for key, tensor in tensors:
                following = key, tensor, thread.submit(map_pages, tensor)
                if waiting is not None:
                    yield self._wait(*waiting)
                waiting = following
            if waiting is not None:
                yield self._wait(*waiting)

    def _wait(self, key: Key, tensor: Tensor, read: Future[None]) -> tuple[Key, Tensor]:
        start = time.perf_counter()
        read.result()
        self.num_bytes += tensor.nbytes
        self.read_s += time.perf_counter() - start
        return key, tensor

    @contextlib.contextmanager
    def converting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.convert_s += time.perf_counter() - start

    def log(self) -> None:
        total_s = time.perf_counter() - self._start
        logger.info(
            "weights: %.2f GB in %.2f s (%.1f GB/s): read %.2f s, convert %.2f s, other %.2f s",
            self.num_bytes / 1e9,
            total_s,
            self.num_bytes / 1e9 / total_s,
            self.read_s,
            self.convert_s,
            total_s - self.read_s - self.convert_s,
        )
