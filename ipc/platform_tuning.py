"""What a process asks of Python's collector, the scheduler and the memory of the system, to start
faster, to use less memory, and not to delay a step.

Must not know: what the process does.

`QUIRE_PLATFORM_TUNING=0` turns off all of it, and what starts early because of it
(ipc/early_process.py, ipc/early_engine.py, executor/torch_libraries.py,
executor/weights/early_memory.py, executor/lean_import.py). No result depends on any of it.
tests/bench/LEDGER.md has the gain of each under "Platform tuning".
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from .operating_system import SYSTEM, Linux

_LIBC = ctypes.CDLL(None)
_MADVISE = _LIBC.madvise  # found now: while another thread loads a library, the search waits
_IS_LINUX = isinstance(SYSTEM, Linux)
# Linux 5.14; older kernels refuse, and pages are allocated or read at their first use
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


def is_enabled() -> bool:
    return os.environ.get("QUIRE_PLATFORM_TUNING") != "0"


# ---------------------------------------------------------------- garbage


def begin_start() -> None:
    """Collects no garbage from now on: imports, a model and a tokenizer make a million objects
    and no garbage.
    """
    if is_enabled():
        gc.disable()


def end_start() -> None:
    """Ends what begin_start began: its objects are permanent, and a collection that visited them
    would stop a step for 0.1 s. No effect in a process that is another program's.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage is collected meanwhile. Unlike the rest of this module it is no tuning."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def prepare_for_streams(*, gives_way: bool = True) -> None:
    """Called when an engine has been loaded: prepares this process for many streams.

    A step of many streams makes thousands of short-lived objects, which form no cycles. A
    collection that visited what was loaded would stop all of them for 20 to 50 ms. `gives_way`: to
    an engine in another process.
    """
    if is_enabled():
        gc.collect()
        gc.set_threshold(20_000, 50, 20)
        gc.freeze()
    if gives_way:
        give_way()


# ---------------------------------------------------------------- cores


def give_way() -> None:
    """Schedules this process's threads so that they do not preempt others (SCHED_BATCH).

    A thread then gets a core when another offers it, as the engine's kernels do between two calls,
    or at the next tick of the system. The threads of a kernel wait for each other, so one
    preemption delays all. No effect where the system does not allow it, or where another policy
    has been chosen (chrt).
    """
    if is_enabled() and hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        for thread_id in os.listdir("/proc/self/task"):
            # the thread has just ended, or a sandbox forbids the call
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(thread_id), os.SCHED_BATCH, os.sched_param(0))


def stop_giving_way() -> None:
    """Undoes give_way in a process that was started by one that gives way."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_BATCH:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


# ---------------------------------------------------------------- memory


def trim_heap() -> None:
    """Returns to the system what the C library keeps of freed memory. glibc only."""
    if is_enabled() and hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def use_huge_pages(memory: mmap.mmap) -> None:
    if is_enabled() and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)


def use_small_pages(start: int, num_bytes: int) -> None:
    """Takes use_huge_pages back for the pages from the address `start`."""
    if is_enabled() and hasattr(mmap, "MADV_NOHUGEPAGE"):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(first, start + num_bytes - first, mmap.MADV_NOHUGEPAGE)


def allocate_pages(start: int, num_bytes: int) -> bool:
    """Fills the pages from the address `start` with zeros, without the GIL. Returns whether the
    system has done it.
    """
    return _IS_LINUX and _advise(start, num_bytes, _MADV_POPULATE_WRITE)


def read_pages(start: int, num_bytes: int) -> bool:
    """Reads the pages of a mapped file from the address `start`, without the GIL."""
    return _IS_LINUX and _advise(start, num_bytes, _MADV_POPULATE_READ)


def drop_pages(start: int, num_bytes: int) -> bool:
    """Gives back the pages of a mapped file from the address `start`. They are read again at their
    next use; what was written to them may be lost. macOS takes it as a hint.
    """
    return _advise(start, num_bytes, mmap.MADV_DONTNEED)


def _advise(start: int, num_bytes: int, advice: int) -> bool:
    return _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), advice) == 0


def unmap_unchanged() -> int:
    """Unmaps the read-only pages of libraries; returns the bytes.

    They stay in the page cache, and used pages are mapped again by themselves, 64 KiB at a time.
    Loading torch's libraries touches tens of MB that no step needs. Mappings with modified pages
    (by a debugger or the loader) are kept, because the modifications would be lost. Linux only.
    """
    if not is_enabled() or not _IS_LINUX:
        return 0
    num_bytes = start = end = resident = 0
    is_library = False
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        if not key.endswith(":"):  # "START-END PERMISSIONS OFFSET DEVICE INODE PATH"
            start, end = (int(address, 16) for address in key.split("-"))
            permissions, *_, path = value.split(maxsplit=4)
            is_library = permissions.startswith("r-") and ".so" in Path(path).name
        elif key == "Rss:":
            resident = 1024 * int(value.split()[0])
        elif key == "Anonymous:" and is_library and value.split()[0] == "0":
            num_bytes += resident if drop_pages(start, end - start) else 0
    return num_bytes
