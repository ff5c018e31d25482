"""The ranks that share the layers of a model: which part each has, and sums and joins of what they
compute, in memory that all share.

Must not know: layers, models, steps, how the ranks were started.

Every rank adds the parts in the order of ranks, in fp32, so that all have the same bits, in every
run.

    memory    [ even: rank 0 | rank 1 | … ][ odd: rank 0 | rank 1 | … ]

A rank writes its part, meets the others once, and reads all parts. The next operation uses the
other half: a rank that writes there has met all others since they read it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ...ipc.errors import InvalidParameterError
from .ring import PART_FLOATS, GroupEnds
from .stages import WHOLE, Stages


class TensorGroup:
    """A rank's view of its group. Without ends it is the only rank."""

    def __init__(self, rank: int = 0, ends: GroupEnds | None = None, stages: Stages = WHOLE):
        """stages: of the stack, of which this group has one."""
        self.rank = rank
        self.size = 1 if ends is None else len(ends.events)
        self.stages = stages
        self.num_ranks = self.size * stages.count  # in all stages
        self._half = 0
        if ends is None:
            return
        memory = mmap.mmap(ends.memory, 2 * self.size * PART_FLOATS * 4)
        whole = torch.frombuffer(memory, dtype=torch.float32)  # keeps `memory` alive
        self._parts = whole.view(2, self.size, PART_FLOATS)
        others = [other for other in range(self.size) if other != rank]
        self._signals = [ends.events[rank][other] for other in others]
        self._waits = [ends.events[other][rank] for other in others]

    def share(self, count: int, name: str) -> int:
        """How many of `count` heads or rows each rank has: equally many, or one that several ranks
        have.

        Raises InvalidParameterError, which names what is divided, where that is not possible.
        """
        if count % self.size and self.size % count:
            raise InvalidParameterError(
                "tensor_parallel_size",
                f"must divide the model's {name}={count}, or be a multiple of it, got {self.size}",
            )
        return max(1, count // self.size)

    def range_of(self, count: int, unit: int = 1) -> tuple[int, int]:
        """This rank's part [begin, end) of `count` rows, which are divided in units; see share."""
        num_units = count // unit
        begin, size = self.rank * num_units // self.size, self.share(num_units, "rows")
        return begin * unit, (begin + size) * unit

    def even_range(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """This rank's part [begin, end) of `count` rows in pieces that differ by one row at most,
        or that of `rank`.
        """
        rank = self.rank if rank is None else rank
        return count * rank // self.size, count * (rank + 1) // self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, of any shape -> f32."""
        mine = x.reshape(-1)
        total = torch.empty(mine.shape, dtype=torch.float32)
        for begin in range(0, len(mine), PART_FLOATS):
            piece = mine[begin : begin + PART_FLOATS]
            parts = self._exchange(piece)
            out = total[begin : begin + len(piece)]
            out.copy_(parts[0, : len(piece)])
            for part in parts[1:]:
                out += part[: len(piece)]
        return total.view(x.shape)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [R, widths[rank]] f32 of each rank -> [R, sum of widths], side by side."""
        gathered = torch.empty(len(x), sum(widths), dtype=torch.float32)
        num_rows = max(1, PART_FLOATS // max(widths))
        for begin in range(0, len(x), num_rows):
            rows = x[begin : begin + num_rows]
            parts = self._exchange(rows.reshape(-1))
            start = 0
            for part, width in zip(parts, widths):
                of_rank = part[: len(rows) * width].view(len(rows), width)
                gathered[begin : begin + len(rows), start : start + width] = of_rank
                start += width
        return gathered

    def _exchange(self, piece: Tensor) -> Tensor:
        """Writes a piece [n] and waits for those of all ranks: [size, PART_FLOATS], valid until the
        exchange after the next.
        """
        parts = self._parts[self._half]
        self._half = 1 - self._half
        parts[self.rank, : len(piece)] = piece
        for fd in self._signals:
            os.eventfd_write(fd, 1)
        for fd in self._waits:
            os.eventfd_read(fd)
        return parts


ALONE = TensorGroup()
