"""Records native calls with the memory that they use, and replays them in a program that is
compiled for another processor (replay_calls.cpp).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import gc
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from quire.kernels.cpu.native.calls import Call, Op, Step, Struct
from quire.kernels.cpu.native.library import library
from torch import Tensor

RUN, PACK_LINEAR, PACK_BLOCKS = range(3)
MOST_BYTES = 32 << 20  # of a call


@dataclass
class Region:
    """Memory that a call may read and write."""

    address: int
    size: int
    has_addresses: bool
    data: bytes = b""

    def holds(self, address: int) -> bool:
        # The address after the last byte is that of no elements.
        return self.address <= address <= self.address + self.size


@dataclass
class Record:
    """A call and its memory, as it was before."""

    name: str
    dtype: int  # of a Call; -1 of others
    out_dtype: int
    kind: int
    arguments: list[int]
    regions: list[Region]


def _calls() -> dict[int, Call]:
    """Address -> call, of those that exist."""
    return {ctypes.addressof(item): item for item in gc.get_objects() if isinstance(item, Call)}


def _existing() -> dict[int, tuple[int, bool]]:
    """Address -> size and whether there are addresses, of the tensors and arrays that exist."""
    found: dict[int, tuple[int, bool]] = {}
    for item in gc.get_objects():
        if isinstance(item, ctypes.Array):
            is_table = item._type_ is ctypes.c_int64
            found[ctypes.addressof(item)] = ctypes.sizeof(item), is_table
        elif isinstance(item, Tensor) and item.layout == torch.strided and item.numel():
            storage = item.untyped_storage()
            is_table = item.dtype == torch.int64
            size, was_table = found.get(storage.data_ptr(), (0, False))
            found[storage.data_ptr()] = max(size, storage.nbytes()), is_table or was_table
    return found


def _reached(
    existing: dict[int, tuple[int, bool]], roots: list[Region], words: list[int]
) -> list[Region]:
    """The roots, and the memory that they and the addresses among the words lead to."""
    regions = {region.address: region for region in roots}
    starts = sorted(existing)
    waiting = list(words)
    while waiting:
        pointer = waiting.pop()
        place = bisect.bisect(starts, pointer) - 1
        if place < 0 or (start := starts[place]) in regions:
            continue
        size, is_table = existing[start]
        if pointer < start + size:
            regions[start] = Region(start, size, is_table)
            if is_table:
                inside = ctypes.string_at(start, size // 8 * 8)
                waiting += [word for (word,) in struct.iter_unpack("<q", inside) if word > 1 << 32]
    return list(regions.values())


def _struct_region(value: ctypes.Structure | ctypes.Array) -> Region:
    return Region(ctypes.addressof(value), ctypes.sizeof(value), True)


def _pointers(value: Struct) -> list[int]:
    """The addresses among a struct's fields."""
    words = [getattr(value, name) for name, kind in value._fields_ if kind is ctypes.c_void_p]
    words += [getattr(value, name) for name in getattr(value, "pointers", ())]
    return [word for word in words if word]


@dataclass
class Recording:
    """The calls that were recorded."""

    records: list[Record] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # by operation

    def write(self, path: Path) -> None:
        """Writes what replay_calls reads."""
        with path.open("wb") as file:
            file.write(struct.pack("<q", len(self.records)))
            for record in self.records:
                numbers = (record.kind, *record.arguments, len(record.regions))
                file.write(struct.pack("<8q", *numbers))
                for region in record.regions:
                    head = (region.address, region.size, region.has_addresses)
                    file.write(struct.pack("<3q", *head) + region.data)

    def split(self, results: bytes) -> list[list[bytes]]:
        """The regions of each call after it ran, of what replay_calls wrote."""
        at, split = 0, []
        for record in self.records:
            split.append([])
            for region in record.regions:
                split[-1].append(results[at : at + region.size])
                at += region.size
        assert at == len(results)
        return split


@contextlib.contextmanager
def recorded(most_of_kind: int | None = None) -> Iterator[Recording]:
    """Records the calls of operations, and of packing, that are made meanwhile: the first
    `most_of_kind` of an operation in a dtype. Calls on more than MOST_BYTES, or on memory that was
    allocated before, are left out.
    """
    recording = Recording()
    own = library.run_all, library.pack_linear, library.pack_blocks
    counts: Counter[tuple[str, int]] = Counter()
    gc.freeze()  # what exists is not looked at again

    def is_wanted(name: str, dtype: int = -1) -> bool:
        counts[name, dtype] += 1
        return most_of_kind is None or counts[name, dtype] <= most_of_kind

    def add(name: str, kind: int, arguments: list[int], *roots: Struct) -> None:
        existing = _existing()
        pointers = [word for root in roots for word in _pointers(root)]
        regions = _reached(existing, [_struct_region(r) for r in roots], pointers + arguments)
        is_known = all(any(r.holds(word) for r in regions) for word in pointers)
        if not is_known or sum(region.size for region in regions) > MOST_BYTES:
            recording.left_out[name] += 1
            return
        for region in regions:
            region.data = ctypes.string_at(region.address, region.size)
        arguments += [0] * (6 - len(arguments))
        dtype = getattr(roots[0], "dtype", -1) if roots else -1
        out_dtype = getattr(roots[0], "out_dtype", dtype) if roots else -1
        recording.records.append(Record(name, dtype, out_dtype, kind, arguments, regions))

    def run_all(addresses: ctypes.Array, step: Step) -> None:
        calls: dict[int, Call] = {}
        for address in addresses:
            op, dtype = (ctypes.c_int32 * 2).from_address(address)
            name = Op(op).name
            if is_wanted(name, dtype):
                calls = calls or _calls()
                if address in calls:
                    words = [address, ctypes.addressof(step)]
                    add(name, RUN, words, calls[address], step)
                else:
                    recording.left_out[name] += 1
            own[0]((ctypes.c_void_p * 1)(address), step)

    def pack_linear(*arguments: int) -> None:
        if is_wanted("pack_linear"):
            add("pack_linear", PACK_LINEAR, list(arguments))
        own[1](*arguments)

    def pack_blocks(rows: int, count: int, blocks: int, layout: Struct, *packed: int) -> None:
        if is_wanted("pack_blocks"):
            arguments = [rows, count, blocks, ctypes.addressof(layout), *packed]
            add("pack_blocks", PACK_BLOCKS, arguments, layout)
        own[2](rows, count, blocks, layout, *packed)

    replaced = {"run_all": run_all, "pack_linear": pack_linear, "pack_blocks": pack_blocks}
    vars(library).update(replaced)
    try:
        yield recording
    finally:
        for name in replaced:
            del vars(library)[name]
        gc.unfreeze()
