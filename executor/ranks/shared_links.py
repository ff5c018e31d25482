"""Connects the ranks of one machine by memory that they share, and eventfds.

Must not know: layers, models, steps, what the tensors are.

    memory    [ even: rank 0 | rank 1 | … ][ odd: rank 0 | rank 1 | … ]

A rank writes its part, meets the others once, and reads all parts. The next exchange uses the other
half: a rank that writes there has met all others since they read it.
"""

from __future__ import annotations

import math
import mmap
import os

import torch
from torch import Tensor

from ...kernels.cpu.native.library import library
from ...kernels.cpu.native.ranks import NativeExchange, memory_bytes
from ..groups import PART_FLOATS
from ..groups.stages import Stages
from ..groups.tensor_group import TensorGroup
from .messages import RankEnds
from .ring import GroupEnds, RingReader, RingWriter, StageEnds


class SharedExchange:
    """Implements Exchange (tensor_group.py)."""

    def __init__(self, rank: int, ends: GroupEnds):
        self.rank, self.size = rank, len(ends.events)
        self._half = 0
        memory = mmap.mmap(ends.memory, 2 * self.size * PART_FLOATS * 4)
        whole = torch.frombuffer(memory, dtype=torch.float32)  # keeps `memory` alive
        self._parts = whole.view(2, self.size, PART_FLOATS)
        others = [other for other in range(self.size) if other != rank]
        self._signals = [ends.events[rank][other] for other in others]
        self._waits = [ends.events[other][rank] for other in others]

    def exchange(self, piece: Tensor, num_floats: int) -> Tensor:
        """See Exchange."""
        parts = self._parts[self._half]
        self._half = 1 - self._half
        parts[self.rank, : len(piece)] = piece
        for fd in self._signals:
            os.eventfd_write(fd, 1)
        for fd in self._waits:
            os.eventfd_read(fd)
        return parts


class RingStageLinks:
    """Implements StageLinks (stages.py)."""

    def __init__(self, ends: StageEnds):
        self.stage, self.count = ends.stage, 1 + len(ends.links)
        is_first, is_last = self.stage == 0, self.stage == self.count - 1
        self._reader = None if is_first else RingReader(ends.links[self.stage - 1])
        self._writer = None if is_last else RingWriter(ends.links[self.stage])

    def send(self, x: Tensor) -> None:
        """See StageLinks."""
        assert self._writer is not None
        self._writer.send(_bytes(x))

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See StageLinks."""
        assert self._reader is not None
        return _tensor(self._reader.receive(), shape, dtype)


def shared_group(ends: RankEnds, *, is_process: bool = False) -> TensorGroup:
    """A rank's view of its group and of the stages. is_process: no other rank runs in this process,
    whose native code may wait for them.
    """
    stages = Stages(None if ends.stages is None else RingStageLinks(ends.stages))
    if ends.group is None:
        return TensorGroup(stages=stages)
    exchange = SharedExchange(ends.rank % len(ends.group.events), ends.group)
    recorded = None
    if is_process and library is not None:
        recorded = _native_exchange(ends, ends.group, exchange)
    return TensorGroup(exchange, stages, recorded=recorded)


def _native_exchange(ends: RankEnds, group: GroupEnds, exchange: SharedExchange) -> NativeExchange:
    num_bytes = memory_bytes(exchange.size, PART_FLOATS)
    os.ftruncate(group.native_memory, num_bytes)  # no change where another rank did it
    memory = torch.frombuffer(mmap.mmap(group.native_memory, num_bytes), dtype=torch.uint8)
    times = ends.awake_s, ends.timeout_s
    return NativeExchange(memory, exchange.rank, exchange.size, PART_FLOATS, *times)


def _bytes(x: Tensor) -> memoryview:
    return x.contiguous().view(-1).view(torch.uint8).numpy().data


def _tensor(data: bytes, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise RuntimeError(f"{len(data)} bytes arrived from another stage, not {shape} {dtype}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
