"""Reads weight files ahead and allocates memory for packed weights while torch is imported. A
gigabyte takes a second or more on a virtual machine.

Must not know: torch, which is not imported yet; models.

    main thread     begin ─▶ import torch (one core, seconds) ─▶ take ─▶ weights are packed into it
    other threads   the system fills pages with zeros; files are read into the page cache
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ...ipc import platform_tuning
from ...ipc.config import EngineConfig
from ...ipc.machine import free_memory_bytes
from ...ipc.models.checkpoint import OTHER_PARTS
from ...ipc.models.gguf import is_gguf
from ...ipc.models.memory_plan import HEAD_BITS, QUANTIZATION_BITS, quantized_bytes
from ...ipc.models.ranks import num_ranks
from ...ipc.operating_system import SYSTEM
from .packed_cache import PackedCache, weight_files

HUGE_PAGE_BYTES = 2 * 2**20
MAX_HEADER_BYTES = 100 * 10**6  # the format's own limit
# While the system fills a step, no other thread can map or unmap memory.
_STEP_BYTES = 8 * 2**20
_SAMPLES = 64

_reserved: mmap.mmap | None = None


def begin(
    config: EngineConfig, *, wait_for_import: Callable[[], object] | None = None
) -> list[threading.Thread]:
    """Starts to read and to allocate. Call it before torch is imported; later it has no effect.
    `wait_for_import`: given if another thread has begun to import torch; returns when torch's
    libraries are loaded. Otherwise they would be mapped only between two steps of allocating.

    It never fails: without it, loading only takes longer.
    """
    global _reserved
    if not platform_tuning.is_enabled():
        return []
    if "torch" in sys.modules and wait_for_import is None:
        return []
    if config.load_config.load_format == "dummy":
        return []
    if num_ranks(config) > 1:  # this process loads nothing
        return []
    try:
        cache = PackedCache.of(config)
        if cache is not None and not cache.may_be_read():
            cache = None
        files = weight_files(Path(config.model_config.model)) if cache is None else [cache.path]
        num_stored = sum(path.stat().st_size for path in files)
        num_early, num_bytes = _needed(config, files) if cache is None else (0, 0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
        return []  # the loader reports what is wrong
    free_bytes = free_memory_bytes()
    # if it barely fits, the loader requests memory step by step
    if num_early > 0 and 2 * num_bytes <= free_bytes:
        _reserved = mmap.mmap(
            -1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        platform_tuning.use_huge_pages(_reserved)
    if _reserved is not None:
        threads = [threading.Thread(target=_populate, args=(_reserved, num_early, wait_for_import))]
    else:
        threads = []
    if num_stored <= free_bytes:  # otherwise the first pages would be dropped before they are used
        threads.append(threading.Thread(target=_read_ahead, args=(files,)))
    for thread in threads:
        thread.name, thread.daemon = "quire-early-memory", True
        thread.start()
    return threads


def take() -> mmap.mmap | None:
    """Returns the memory once; the caller then owns it."""
    global _reserved
    taken, _reserved = _reserved, None
    return taken


def _needed(config: EngineConfig, files: list[Path]) -> tuple[int, int]:
    """How many bytes to fill early and how many to reserve; zeros if weights will not be packed
    there.
    """
    model_config, device_config = config.model_config, config.device_config
    if device_config.device != "cpu" or device_config.cpu_isa == "none":
        return 0, 0
    if is_gguf(Path(model_config.model)):
        # blocks take as much as in the file
        num_bytes = sum(path.stat().st_size for path in files)
        return (0, 0) if model_config.quantization else (num_bytes, num_bytes)
    shapes = matrices(files)
    packed, largest = packed_bytes(shapes, model_config.dtype, model_config.quantization)
    num_early = packed
    if not model_config.hf_config.get("tie_word_embeddings"):
        num_early -= largest  # an embedding that is not a head is not packed
    if any(
        num_bytes != rows * columns * (4 if model_config.dtype == "float32" else 2)
        for rows, columns, num_bytes in shapes
    ):
        # the file has another dtype than the model: a layer is in memory twice until it is packed
        num_early -= largest
    return num_early, packed


def matrices(files: list[Path]) -> list[tuple[int, int, int]]:
    """Returns (rows, columns, bytes) of every matrix in safetensors files."""
    found = []
    for path in files:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            if OTHER_PARTS.match(name):
                continue
            (start, end), shape = tensor["data_offsets"], tensor["shape"]
            if len(shape) == 2:
                found.append((shape[0], shape[1], end - start))
    return found


def packed_bytes(
    shapes: list[tuple[int, int, int]], dtype: str, quantization: str | None
) -> tuple[int, int]:
    """Estimates the packed size of the matrices, and returns it with the size of the largest in its
    file. The largest is assumed to be the head.
    """
    largest = max(shapes, key=lambda shape: shape[2], default=(0, 0, 0))
    if quantization is None:
        return sum(rows * columns for rows, columns, _ in shapes) * (
            4 if dtype == "float32" else 2
        ), largest[2]
    total = sum(
        quantized_bytes(rows, columns, QUANTIZATION_BITS[quantization])
        for rows, columns, _ in shapes
    )
    return total + quantized_bytes(*largest[:2], HEAD_BITS) - quantized_bytes(
        *largest[:2], QUANTIZATION_BITS[quantization]
    ), largest[2]


def _read_ahead(files: list[Path]) -> None:
    """Brings files that are not there to the page cache, in calls that release the GIL.

    The system takes advice (posix_fadvise) for at most a megabyte of a file.
    """
    for path in files:
        try:
            with path.open("rb") as file, open(os.devnull, "wb") as null:
                size = os.fstat(file.fileno()).st_size
                at = size if _is_cached(file.fileno(), size) else 0
                while at < size and (sent := os.sendfile(null.fileno(), file.fileno(), at, 2**30)):
                    at += sent
        except OSError:
            return  # the loader reports what is wrong


def _is_cached(file: int, size: int) -> bool:
    """Whether some pages of the file are in memory. They stand for all."""
    return all(SYSTEM.is_in_memory(file, i * size // _SAMPLES) for i in range(_SAMPLES))


def _populate(
    memory: mmap.mmap, num_bytes: int, wait_for_import: Callable[[], object] | None = None
) -> None:
    """Touches the pages in steps, releasing the GIL in each. Runs in a thread."""
    if wait_for_import is not None:
        wait_for_import()
    whole = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(whole) + -ctypes.addressof(whole) % HUGE_PAGE_BYTES
    for offset in range(0, num_bytes, _STEP_BYTES):
        step = min(_STEP_BYTES, -(-(num_bytes - offset) // mmap.PAGESIZE) * mmap.PAGESIZE)
        if not platform_tuning.allocate_pages(start + offset, step):
            return
