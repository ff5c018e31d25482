"""Places buffers in one arena so that two that live at the same time never overlap.

Must not know: tensors, calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Lifetime(NamedTuple):
    num_bytes: int
    first: int  # the call that writes it
    last: int  # the last call that reads or writes it


def place(buffers: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Returns each buffer's offset, and the size of the arena in bytes.

    The largest buffers come first, each in the lowest gap that fits.
    """
    offsets = [0] * len(buffers)
    placed: list[int] = []
    for index in sorted(range(len(buffers)), key=lambda i: -buffers[i].num_bytes):
        mine = buffers[index]
        beside = [
            i for i in placed if buffers[i].first <= mine.last and mine.first <= buffers[i].last
        ]
        offset = 0
        for other in sorted(beside, key=offsets.__getitem__):
            if offset + mine.num_bytes <= offsets[other]:
                break
            offset = max(offset, offsets[other] + buffers[other].num_bytes)
        offsets[index] = offset
        placed.append(index)
    return offsets, max(
        (offset + buffer.num_bytes for offset, buffer in zip(offsets, buffers)), default=0
    )
