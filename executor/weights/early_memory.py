"""Memory for packed weights, asked of the system while torch is imported: to be given a gigabyte
takes a second or more on a virtual machine.

Must not know: torch, which is not there yet; models.

    main thread    begin ─▶ import torch (one core, seconds) ─▶ take ─▶ weights are packed into it
    another        pages are filled with zeros by the system
"""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
import sys
import threading
from pathlib import Path

from ...ipc.config import EngineConfig
from ...ipc.machine import free_memory_bytes
from ...ipc.memory_plan import HEAD_BITS, QUANTIZATION_BITS, quantized_bytes

HUGE_PAGE_BYTES = 2 * 2**20
MAX_HEADER_BYTES = 100 * 10**6  # the format's own limit
_STEP_BYTES = 32 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older ones refuse, and pages come when they are written

_LIBC = ctypes.CDLL(None)
_reserved: mmap.mmap | None = None


def begin(config: EngineConfig) -> threading.Thread | None:
    """To be called before torch is imported; later there is nothing to wait for, and nothing is
    done. Nothing fails: it is a wish.
    """
    global _reserved
    model_config, device_config = config.model_config, config.device_config
    if (
        "torch" in sys.modules
        or device_config.device != "cpu"
        or device_config.cpu_isa == "none"
        or config.load_config.load_format == "dummy"
    ):
        return None
    try:
        shapes = matrices(Path(model_config.model))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
        return None  # the loader says what is wrong
    packed, largest = packed_bytes(shapes, model_config.dtype, model_config.quantization)
    num_early = packed
    if not model_config.hf_config.get("tie_word_embeddings"):
        num_early -= largest  # an embedding that is no head is not packed
    if any(
        num_bytes != rows * columns * (4 if model_config.dtype == "float32" else 2)
        for rows, columns, num_bytes in shapes
    ):
        # of another dtype than the model's: a layer lies in memory twice until it is packed
        num_early -= largest
    # what fits only just is asked for step by step
    if num_early <= 0 or 2 * packed > free_memory_bytes():
        return None
    _reserved = mmap.mmap(-1, packed + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _reserved.madvise(mmap.MADV_HUGEPAGE)
    thread = threading.Thread(
        target=_populate, args=(_reserved, num_early), name="quire-early-memory", daemon=True
    )
    thread.start()
    return thread


def take() -> mmap.mmap | None:
    """The memory, once; whoever takes it owns it."""
    global _reserved
    taken, _reserved = _reserved, None
    return taken


def matrices(directory: Path) -> list[tuple[int, int, int]]:
    """(rows, columns, bytes) of every matrix in a directory's safetensors files."""
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        for tensor in header.values():
            (start, end), shape = tensor["data_offsets"], tensor["shape"]
            if len(shape) == 2:
                found.append((shape[0], shape[1], end - start))
    return found


def packed_bytes(
    shapes: list[tuple[int, int, int]], dtype: str, quantization: str | None
) -> tuple[int, int]:
    """What matrices take once they are packed, about, and what the largest takes in its file.

    The largest is taken for the head.
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


def _populate(memory: mmap.mmap, num_bytes: int) -> None:
    """Thread. In steps, each of which lets the interpreter go on."""
    whole = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(whole) + -ctypes.addressof(whole) % HUGE_PAGE_BYTES
    for offset in range(0, num_bytes, _STEP_BYTES):
        step = min(_STEP_BYTES, -(-(num_bytes - offset) // mmap.PAGESIZE) * mmap.PAGESIZE)
        if (
            _LIBC.madvise(
                ctypes.c_void_p(start + offset), ctypes.c_size_t(step), _MADV_POPULATE_WRITE
            )
            != 0
        ):
            return
