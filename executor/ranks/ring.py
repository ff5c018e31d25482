"""Sends messages through shared memory from one process to others, in order, each to every reader.

Must not know: what a message holds, which processes there are.

    memory    [ slot 0 | slot 1 | … ]     a message takes one slot or several
    ready     an eventfd of each reader: slots that it has not read
    free      an eventfd of each reader: slots that it has read, or that were never written

Waits block in the kernel. Reads and writes of an eventfd order the accesses to memory.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Sequence

import msgspec

from ..groups import PART_FLOATS

SLOT_BYTES = 256 * 1024
NUM_SLOTS = 16
_HEADER = struct.Struct("<II")  # bytes in this slot, whether more follow


class RingEnds(msgspec.Struct, frozen=True):
    """Descriptors, which a child inherits by number."""

    memory: int
    ready: list[int]
    free: list[int]

    @classmethod
    def create(cls, num_readers: int) -> RingEnds:
        memory = os.memfd_create("quire-ring")
        os.ftruncate(memory, SLOT_BYTES * NUM_SLOTS)
        return cls(
            memory,
            [make_event() for _ in range(num_readers)],
            [make_event(NUM_SLOTS) for _ in range(num_readers)],
        )

    @property
    def fds(self) -> list[int]:
        return [self.memory, *self.ready, *self.free]


class GroupEnds(msgspec.Struct, frozen=True):
    """Descriptors of an exchange (shared_links.py), which the ranks inherit by number."""

    memory: int
    events: list[list[int]]  # [from rank][to rank]; -1 to itself
    # of the exchange in native code (kernels/cpu/native/ranks.py), whose size the ranks set
    native_memory: int

    @classmethod
    def create(cls, size: int) -> GroupEnds:
        memory = os.memfd_create("quire-tensors")
        os.ftruncate(memory, 2 * size * PART_FLOATS * 4)
        events = [[-1 if a == b else make_event() for b in range(size)] for a in range(size)]
        native_memory = os.memfd_create("quire-exchange")
        os.ftruncate(native_memory, mmap.PAGESIZE)
        return cls(memory, events, native_memory)

    def alarm(self) -> mmap.mmap:
        """The memory that set_off takes. It stays valid without the descriptors."""
        return mmap.mmap(self.native_memory, mmap.PAGESIZE)

    @property
    def fds(self) -> list[int]:
        return [
            self.memory,
            self.native_memory,
            *(fd for row in self.events for fd in row if fd >= 0),
        ]


class StageEnds(msgspec.Struct, frozen=True):
    """Descriptors of what connects stages (shared_links.py), which a rank inherits by number."""

    stage: int
    links: list[RingEnds]  # from each stage to the next one

    @property
    def fds(self) -> list[int]:
        return [fd for ring in self.links for fd in ring.fds]


def set_off(alarm: mmap.mmap) -> None:
    """Ends the exchanges in native code that wait for a rank, and all later ones (LOST in
    kernels/cpu/native/src/abi_ranks.h).
    """
    struct.pack_into("<I", alarm, 0, 1)


def make_event(count: int = 0) -> int:
    """An eventfd from which each read takes 1."""
    return os.eventfd(count, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)


class RingWriter:
    """The writing end. One thread uses it at a time."""

    def __init__(self, ends: RingEnds, take: Callable[[int], object] = os.eventfd_read):
        """`take(fd)` waits until an eventfd is above 0 and takes 1; it may raise instead."""
        self._memory = mmap.mmap(ends.memory, SLOT_BYTES * NUM_SLOTS)
        self._ends, self._take = ends, take
        self._slot = 0

    def send(self, data: bytes | memoryview) -> None:
        """Copies the message; waits while a reader is NUM_SLOTS slots behind."""
        rest = memoryview(data).cast("B")
        room = SLOT_BYTES - _HEADER.size
        while True:
            part, rest = rest[:room], rest[room:]
            for fd in self._ends.free:
                self._take(fd)
            start = self._slot * SLOT_BYTES
            _HEADER.pack_into(self._memory, start, len(part), bool(rest))
            start += _HEADER.size
            self._memory[start : start + len(part)] = part
            for fd in self._ends.ready:
                os.eventfd_write(fd, 1)
            self._slot = (self._slot + 1) % NUM_SLOTS
            if not rest:
                return


class RingReader:
    """A reading end. One thread uses it at a time."""

    def __init__(
        self, ends: RingEnds, reader: int = 0, take: Callable[[int], object] = os.eventfd_read
    ):
        """`take`: see RingWriter."""
        self._memory = mmap.mmap(ends.memory, SLOT_BYTES * NUM_SLOTS)
        self.ready_fd, self._free_fd = ends.ready[reader], ends.free[reader]
        self._take = take
        self._slot = 0
        self._parts: list[bytes] = []  # of a message whose end has not arrived

    def receive(self) -> bytes:
        """Waits for a message."""
        while (message := self.receive_slot()) is None:
            pass
        return message

    def receive_slot(self) -> bytes | None:
        """Waits for a slot. Returns the message that it completes, if it does."""
        self._take(self.ready_fd)
        start = self._slot * SLOT_BYTES
        num_bytes, has_more = _HEADER.unpack_from(self._memory, start)
        start += _HEADER.size
        self._parts.append(self._memory[start : start + num_bytes])
        os.eventfd_write(self._free_fd, 1)
        self._slot = (self._slot + 1) % NUM_SLOTS
        if has_more:
            return None
        message = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        return message


def join_frames(frames: Sequence[bytes | memoryview]) -> bytes:
    """One message of several frames (ipc/codec.py)."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    head = struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)
    return b"".join([head, *frames])


def split_frames(message: bytes) -> list[memoryview]:
    """The frames of `join_frames`, without a copy."""
    (count,) = struct.unpack_from("<Q", message)
    sizes = struct.unpack_from(f"<{count}Q", message, 8)
    view, start, frames = memoryview(message), 8 * (1 + count), []
    for size in sizes:
        frames.append(view[start : start + size])
        start += size
    return frames
