"""The ranks that share the layers of a model: says which part each has, sums and joins what they
compute.

Must not know: layers, models, steps, how the ranks were started, what carries their parts
(ranks/shared_links.py, ranks/torch_links.py).

Every rank adds the parts in the order of ranks, in fp32, so that all have the same bits, in every
run and with every exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...ipc.errors import InvalidParameterError
from ...kernels.cpu.native.program import is_recording
from . import PART_FLOATS
from .stages import WHOLE, Stages


class Exchange(Protocol):
    """Gives the ranks of a group each other's parts."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, piece: Tensor, num_floats: int) -> Tensor:
        """Gives a piece [n] to all ranks and waits for theirs: f32 [size, at least num_floats],
        valid until the exchange after the next. num_floats: of the longest piece, PART_FLOATS at
        most.
        """
        ...


class RecordedExchange(Protocol):
    """What a recorded model calls in place of an Exchange; see NativeExchange (kernels)."""

    def all_reduce(self, x: Tensor, dtype: torch.dtype) -> Tensor: ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor: ...


class TensorGroup:
    """A rank's view of its group. Without an exchange it is the only rank."""

    def __init__(
        self,
        exchange: Exchange | None = None,
        stages: Stages = WHOLE,
        num_on_machine: int | None = None,
        recorded: RecordedExchange | None = None,
    ):
        """stages: of the stack, of which this group has one. num_on_machine: ranks on this machine,
        of all stages and with this one; by default all. recorded: of the same ranks; None: a model
        with parts among ranks runs operation by operation.
        """
        self.rank = 0 if exchange is None else exchange.rank
        self.size = 1 if exchange is None else exchange.size
        self.stages = stages
        self.num_ranks = self.size * stages.count  # in all stages
        self.num_on_machine = num_on_machine or self.num_ranks
        self._exchange, self._recorded = exchange, recorded

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number among all ranks, those of the first stage first; and their number."""
        return self.stages.stage * self.size + self.rank, self.num_ranks

    @property
    def can_record(self) -> bool:
        """Whether a model's step may be one native call."""
        return self.size == 1 or self._recorded is not None

    def all_agree(self, mine: bool) -> bool:
        """Whether it is true on all ranks, which all ask."""
        if self.size == 1:
            return mine
        return float(self.all_reduce(torch.tensor([float(not mine)]))) == 0

    def share(self, count: int, name: str) -> int:
        """How many of `count` heads or rows each rank has: equally many, or one that others have
        too.

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

    def all_reduce(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The sum of all ranks' x, of any shape, rounded to dtype."""
        assert self._exchange is not None
        if is_recording():
            assert self._recorded is not None
            return self._recorded.all_reduce(x, dtype)
        mine = x.reshape(-1)
        total = torch.empty(mine.shape, dtype=torch.float32, device=x.device)
        for begin in range(0, len(mine), PART_FLOATS):
            piece = mine[begin : begin + PART_FLOATS]
            parts = self._exchange.exchange(piece, len(piece))
            out = total[begin : begin + len(piece)]
            out.copy_(parts[0, : len(piece)])
            for part in parts[1:]:
                out += part[: len(piece)]
        return total.view(x.shape).to(dtype)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [R, widths[rank]] of each rank -> [R, sum of widths] of its dtype, side by side."""
        assert self._exchange is not None
        if is_recording():
            assert self._recorded is not None
            return self._recorded.all_gather(x, widths)
        gathered = torch.empty(len(x), sum(widths), dtype=x.dtype, device=x.device)
        widest = max(widths)
        num_rows = max(1, PART_FLOATS // widest)
        for begin in range(0, len(x), num_rows):
            rows = x[begin : begin + num_rows]
            parts = self._exchange.exchange(rows.reshape(-1), len(rows) * widest)
            start = 0
            for part, width in zip(parts, widths):
                of_rank = part[: len(rows) * width].view(len(rows), width)
                gathered[begin : begin + len(rows), start : start + width] = of_rank
                start += width
        return gathered


ALONE = TensorGroup()
