"""Stores blocks of bytes by name, in a file or in memory. Its size is bounded, blocks have
checksums, and the least recently used block leaves first.

Must not know: torch, what a block holds, why it is wanted.

    page 0    magic, what blocks are valid for, their size and number; number of changes, clock
    log       a ring of the places that changed last
    entries   for each place: name, checksum, time of last use (0: the place is free)
    blocks    each at a multiple of a page

The entries are mapped. Blocks are read and written with preadv and pwritev, straight from and to
the caller's memory: a full disk, a disk that fails and a file that was cut short are errors then,
and no signal that ends the process.

Several processes may use a file at once. A process that reads or writes blocks holds a lock on it,
which the system releases when the process dies. A place is free while its block is written, and a
block counts only if its checksum is right; so it does not matter where a process or a machine
stops. Each process finds names in a dictionary of its own, which it updates from the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import threading
import time
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from ...ipc.operating_system import SYSTEM
from ...ipc.own_files import UntrustedFileError, open_own

logger = logging.getLogger(__name__)

MAGIC = b"QUIREKV\x01"
NAME_BYTES = 32
HEADER = Struct("<8s32sQQ")  # magic, identity, bytes of a block, number of places
HEADER_BYTES = mmap.PAGESIZE
COUNTERS_AT = 1024  # in page 0: number of changes, clock
LOG_ENTRIES = 4096
ENTRY = np.dtype([("name", f"V{NAME_BYTES}"), ("checksum", "<u4"), ("spare", "<u4")])
LOCK_TIMEOUT_S = 0.5  # another process copies a few hundred blocks in this time
PAUSE_S = 10.0  # without the store, after the lock could not be taken
FREE = bytes(NAME_BYTES)

Buffers = Sequence[memoryview]


class StoreError(Exception):
    """The file cannot be used; the text says why."""


class Layout(NamedTuple):
    """Where the parts of a store lie. All sizes in bytes."""

    block_bytes: int
    num_places: int

    @property
    def stride(self) -> int:
        return -(-self.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def entries_at(self) -> int:
        return HEADER_BYTES + 4 * LOG_ENTRIES

    @property
    def stamps_at(self) -> int:
        return self.entries_at + ENTRY.itemsize * self.num_places

    @property
    def blocks_at(self) -> int:
        end = self.stamps_at + 8 * self.num_places
        return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def file_bytes(self) -> int:
        return self.blocks_at + self.num_places * self.stride


def plan_layout(block_bytes: int, num_bytes: int) -> Layout:
    """The layout of a store of at most `num_bytes`. Raises StoreError if no block fits."""
    fixed = Layout(block_bytes, 0)
    each = fixed.stride + ENTRY.itemsize + 8
    num_places = (num_bytes - fixed.blocks_at - mmap.PAGESIZE) // each
    if num_places < 1:
        raise StoreError(f"no block of {block_bytes} bytes fits into {num_bytes} bytes")
    return Layout(block_bytes, num_places)


class BlockStore:
    """Several threads may use it, which wait for each other. Names have NAME_BYTES bytes; a block
    is given as several buffers with block_bytes in all.
    """

    def __init__(
        self,
        path: Path | None,
        num_bytes: int,
        block_bytes: int,
        identity: bytes,
        *,
        tracks_changes: bool = False,
    ):
        """`path`: of the file, which is made if it is missing; None: memory of this process, which
        is taken as it is used. `identity`: 32 bytes for all that blocks depend on.
        `tracks_changes`: for take_changes.

        A file that is damaged, or of another identity, is emptied, and one that is not this user's
        own (ipc/own_files.py) is made again, which is logged. A file with another number of places
        keeps it. Raises StoreError, OSError.
        """
        self.path, self.identity = path, identity
        self._threads = threading.RLock()  # beside the lock of processes
        self.num_corrupt = 0  # blocks that were damaged
        self._tracks_changes = tracks_changes
        self._is_unusable = False
        self._paused_until = 0.0
        self._layout = plan_layout(block_bytes, num_bytes)
        self._fd = _open(path)
        try:
            has_lock = self._lock(60.0)
            self._prepare(HEADER.pack(MAGIC, identity, *self._layout))
            if has_lock:
                self._unlock()
        except BaseException:
            os.close(self._fd)
            raise
        self._map()
        self._places: dict[bytes, int] = {}
        self._names: list[bytes] = [FREE] * self.num_places
        self._changes: dict[bytes, None] = {}  # names that came or went since take_changes
        self.reported: set[bytes] = set()  # of these take_changes has said that they are there
        self._num_seen = -1  # changes that the dictionary has
        self._catch_up()

    @property
    def num_places(self) -> int:
        return self._layout.num_places

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    def __len__(self) -> int:
        """The number of blocks that are there."""
        return len(self._places)

    @property
    def is_closed(self) -> bool:
        return self._fd < 0

    # ------------------------------------------------------------ the file

    def _prepare(self, header: bytes) -> None:
        """Gives the file this header and its size. Unless it has them already, it is emptied."""
        size, layout = os.fstat(self._fd).st_size, self._layout
        if size:
            found = os.pread(self._fd, HEADER.size, 0)
            problem = "is damaged"
            if len(found) == HEADER.size:
                magic, identity, block_bytes, num_places = HEADER.unpack(found)
                its_own = Layout(block_bytes, num_places)
                is_same = (magic, identity, block_bytes) == HEADER.unpack(header)[:3]
                if is_same and size == its_own.file_bytes:
                    if its_own != layout:
                        logger.warning(
                            "%s: has room for %d blocks, not for %d; another size needs a new file",
                            self.path,
                            num_places,
                            layout.num_places,
                        )
                    self._layout = its_own
                    return
                problem = "is cut short" if is_same else "is of another model or version"
            logger.warning("%s: %s, and is emptied", self.path, problem)
            os.ftruncate(self._fd, 0)
        if self.path is None:
            os.ftruncate(self._fd, layout.file_bytes)
        else:
            SYSTEM.allocate(self._fd, layout.file_bytes)
        os.pwrite(self._fd, header, 0)

    def _map(self) -> None:
        layout = self._layout
        mapped = mmap.mmap(self._fd, layout.blocks_at)
        self._counters = np.frombuffer(mapped, "<u8", 2, COUNTERS_AT)
        self._log = np.frombuffer(mapped, "<u4", LOG_ENTRIES, HEADER_BYTES)
        self._entries: Any = np.frombuffer(mapped, ENTRY, layout.num_places, layout.entries_at)
        self._stamps = np.frombuffer(mapped, "<u8", layout.num_places, layout.stamps_at)

    def _is_usable(self) -> bool:
        """A file that another program has cut short may not be touched where it is mapped."""
        if self._is_unusable or time.monotonic() < self._paused_until:
            return False
        problem = "it was cut short"
        try:
            if os.fstat(self._fd).st_size >= self._layout.file_bytes:
                return True
        except OSError as error:
            problem = str(error)
        self._give_up(problem)
        return False

    def _give_up(self, reason: str) -> None:
        """Counts as empty from now on, which is logged."""
        logger.error("%s: not used any more: %s", self.path or "offloaded KV blocks", reason)
        self._is_unusable = True
        if self._tracks_changes:
            self._changes.update(dict.fromkeys(self._places))
        self._places.clear()

    def _lock(self, timeout_s: float) -> bool:
        """Takes the lock if it can be taken in time, and says whether. A process that was stopped
        may keep it. Raises OSError.
        """
        end = time.monotonic() + timeout_s
        while self.path is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    self._paused_until = time.monotonic() + PAUSE_S
                    logger.warning("%s: another process keeps it locked", self.path)
                    return False
                time.sleep(0.001)
        return True

    def _unlock(self) -> None:
        if self.path is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Holds the lock, with the names that are there now, and says whether the store can be
        used.
        """
        with self._threads, self._locked_for_processes() as is_usable:
            yield is_usable

    @contextlib.contextmanager
    def _locked_for_processes(self) -> Iterator[bool]:
        has_lock = False
        try:
            has_lock = self._is_usable() and self._lock(LOCK_TIMEOUT_S)
        except OSError as error:
            self._give_up(f"it cannot be locked ({error})")
        try:
            is_usable = has_lock and self._is_usable()
            if is_usable:
                self._catch_up()
            yield is_usable
        finally:
            if has_lock:
                self._unlock()

    # ------------------------------------------------------------ names

    def names(self) -> Container[bytes]:
        """The names that are there, until the next call."""
        with self._threads:
            if not self._is_usable():
                return ()
            self._catch_up()
            return self._places

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The names that have come and gone since the last call, in any process; the first time,
        all that are there.
        """
        with self._threads:
            if self._is_usable():
                self._catch_up()
            places, reported = self._places, self.reported
            added = [name for name in self._changes if name in places and name not in reported]
            removed = [name for name in self._changes if name not in places and name in reported]
            self._changes.clear()
        reported.update(added)
        reported.difference_update(removed)
        return added, removed

    def _catch_up(self) -> None:
        num_changes = int(self._counters[0])
        behind = num_changes - self._num_seen
        if self._num_seen < 0 or not 0 <= behind <= LOG_ENTRIES // 2:
            changed = range(self.num_places)
        elif behind:
            indices = np.arange(self._num_seen, num_changes) % LOG_ENTRIES
            changed = self._log[indices].tolist()
        else:
            return
        self._num_seen = num_changes
        for place in changed:
            if place < self.num_places:
                name = self._entries["name"][place].tobytes() if self._stamps[place] else FREE
                self._note(place, name)

    def _note(self, place: int, name: bytes) -> None:
        old = self._names[place]
        if old == name:
            return
        if old != FREE and self._places.get(old) == place:
            del self._places[old]
        if name != FREE:
            self._places[name] = place
        self._names[place] = name
        if self._tracks_changes:
            self._changes.update(dict.fromkeys(one for one in (old, name) if one != FREE))

    def _log_change(self, place: int, name: bytes) -> None:
        self._log[int(self._counters[0]) % LOG_ENTRIES] = place
        self._counters[0] += 1
        self._num_seen += 1
        self._note(place, name)

    def _tick(self) -> int:
        self._counters[1] += 1
        return int(self._counters[1])

    # ------------------------------------------------------------ blocks

    def write(self, blocks: Sequence[tuple[bytes, Buffers]]) -> int:
        """Keeps blocks, in this order: the first of them leaves first. Returns how many are new.

        Of more blocks than there are places, the last ones are kept.
        """
        blocks = blocks[-self.num_places :]
        num_written = 0
        with self._locked() as is_usable:
            if not is_usable:
                return 0
            for name, _ in blocks:
                if (place := self._places.get(name)) is not None:
                    self._stamps[place] = self._tick()
            new = [(name, buffers) for name, buffers in blocks if name not in self._places]
            for place, (name, buffers) in zip(self._oldest(len(new)), new):
                try:
                    self._write_one(place, name, buffers)
                except OSError as error:
                    self._give_up(str(error))
                    break
                num_written += 1
        return num_written

    def _oldest(self, count: int) -> list[int]:
        stamps = self._stamps
        if count >= len(stamps):
            return np.argsort(stamps, kind="stable").tolist()
        oldest = np.argpartition(stamps, count)[:count]
        return oldest[np.argsort(stamps[oldest], kind="stable")].tolist()

    def _write_one(self, place: int, name: bytes, buffers: Buffers) -> None:
        self._stamps[place] = 0
        self._log_change(place, FREE)
        offset = self._layout.blocks_at + place * self._layout.stride
        written = os.pwritev(self._fd, buffers, offset)
        if written != self._layout.block_bytes:
            raise OSError(f"{written} of {self._layout.block_bytes} bytes were written")
        self._entries["name"][place] = np.void(name)
        self._entries["checksum"][place] = checksum_of(name, buffers)
        self._stamps[place] = self._tick()
        self._log_change(place, name)

    def read(self, blocks: Sequence[tuple[bytes, Buffers]]) -> int:
        """Fills the buffers of the first blocks, up to the first that is not there or is damaged;
        returns their number. What the next buffers hold is not defined.

        A damaged block is forgotten, which is logged. Reading is no use of a block; see touch.
        """
        with self._locked() as is_usable:
            if not is_usable:
                return 0
            num_read = 0
            for name, buffers in blocks:
                place = self._places.get(name)
                if place is None:
                    break
                if (problem := self._read_one(place, name, buffers)) is not None:
                    logger.error(
                        "%s: block %d %s; it counts as absent",
                        self.path or "offloaded KV blocks",
                        place,
                        problem,
                    )
                    self.num_corrupt += 1
                    self._stamps[place] = 0
                    self._log_change(place, FREE)
                    break
                num_read += 1
        return num_read

    def touch(self, names: Iterable[bytes]) -> None:
        """Those of these blocks that are there are used now. The first of them leaves first."""
        with self._locked() as is_usable:
            if is_usable:
                places = [self._places[name] for name in names if name in self._places]
                first = int(self._counters[1]) + 1
                self._stamps[places] = np.arange(first, first + len(places), dtype=np.uint64)
                self._counters[1] += len(places)

    def _read_one(self, place: int, name: bytes, buffers: Buffers) -> str | None:
        """What is wrong with the block."""
        offset = self._layout.blocks_at + place * self._layout.stride
        try:
            num_read = os.preadv(self._fd, buffers, offset)
        except OSError as error:
            return f"cannot be read ({error})"
        if num_read != self._layout.block_bytes:
            return f"is cut short ({num_read} of {self._layout.block_bytes} bytes)"
        if checksum_of(name, buffers) != self._entries["checksum"][place]:
            return "is damaged (its checksum is wrong)"
        return None

    def remove(self, names: Sequence[bytes]) -> None:
        """Forgets these blocks, if they are there."""
        with self._locked() as is_usable:
            for name in names if is_usable else ():
                if (place := self._places.get(name)) is not None:
                    self._stamps[place] = 0
                    self._log_change(place, FREE)

    def clear(self) -> None:
        """Forgets all blocks, for every process."""
        with self._locked() as is_usable:
            if not is_usable:
                return
            self._stamps[:] = 0
            # more than the log holds: the others look at all places
            self._counters[0] += LOG_ENTRIES
            self._catch_up()

    def close(self) -> None:
        """May be called twice."""
        with self._threads:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._is_unusable = -1, True
            self._counters = self._log = self._entries = self._stamps = np.empty(0)


def _open(path: Path | None) -> int:
    if path is None:
        return SYSTEM.anonymous_file("quire-kv-offload")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT
    try:
        return open_own(path, flags)
    except UntrustedFileError as error:
        logger.warning("%s; it is not read, and made again", error)
    try:
        path.unlink()
        return open_own(path, flags)
    except OSError as error:
        raise StoreError(f"{path} cannot be made again: {error}") from error


def checksum_of(name: bytes, buffers: Buffers) -> int:
    """Of a block and the name under which it is kept."""
    checksum = zlib.crc32(name)
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
    return checksum
