"""Records native calls with the memory that they use, and replays them in a program that is
compiled for another processor (replay_calls.cpp).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from quire.kernels.cpu.native.calls import Op, Struct
from quire.kernels.cpu.native.library import library
from torch import Tensor

RUN, PACK_LINEAR, PACK_BLOCKS = range(3)


@dataclass
class Region:
    """Memory that a call may read and write."""

    address: int
    size: int
    has_addresses: bool
    data: bytes = b""


@dataclass
class Record:
    """A call and its memory, as it was before."""

    name: str
    dtype: int  # of a Call; -1 of others
    kind: int
    arguments: list[int]
    regions: list[Region]


def _storages() -> dict[int, tuple[int, bool]]:
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


def _collect(roots: list[Region], pointers: list[int]) -> list[Region]:
    """The regions that a call reaches from the structs and the addresses that it is given."""
    storages = _storages()
    regions = {region.address: region for region in roots}
    waiting = list(pointers)
    while waiting:
        pointer = waiting.pop()
        for start, (size, is_table) in storages.items():
            if start <= pointer < start + size and start not in regions:
                regions[start] = Region(start, size, is_table)
                if is_table:
                    words = ctypes.string_at(start, size // 8 * 8)
                    waiting += [w for (w,) in struct.iter_unpack("<q", words) if w > 1 << 32]
    for region in regions.values():
        region.data = ctypes.string_at(region.address, region.size)
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
def recorded() -> Iterator[Recording]:
    """Records the calls of operations, and of packing, that are made meanwhile."""
    recording = Recording()
    own = library.run, library.pack_linear, library.pack_blocks
    gc.freeze()  # what exists is not looked at again

    def add(name: str, dtype: int, kind: int, arguments: list[int], roots: list[Any]) -> None:
        pointers = [word for root in roots if isinstance(root, Struct) for word in _pointers(root)]
        regions = _collect([_struct_region(root) for root in roots], pointers + arguments)
        arguments += [0] * (6 - len(arguments))
        recording.records.append(Record(name, dtype, kind, arguments, regions))

    def run(call: Any, step: Any) -> None:
        addresses = [ctypes.addressof(call), ctypes.addressof(step)]
        add(Op(call.op).name, call.dtype, RUN, addresses, [call, step])
        own[0](call, step)

    def pack_linear(*arguments: int) -> None:
        add("pack_linear", -1, PACK_LINEAR, list(arguments), [])
        own[1](*arguments)

    def pack_blocks(rows: int, count: int, blocks: int, layout: Any, *packed: int) -> None:
        arguments = [rows, count, blocks, ctypes.addressof(layout), *packed]
        add("pack_blocks", -1, PACK_BLOCKS, arguments, [layout])
        own[2](rows, count, blocks, layout, *packed)

    replaced = {"run": run, "pack_linear": pack_linear, "pack_blocks": pack_blocks}
    vars(library).update(replaced)
    try:
        yield recording
    finally:
        for name in replaced:
            del vars(library)[name]
        gc.unfreeze()
