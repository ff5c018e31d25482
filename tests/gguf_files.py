"""Writes GGUF files: a second opinion on the format beside the gguf package, and the means to write
what that package refuses to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from struct import pack
from typing import Any

from quire.ipc.models import gguf

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
TYPE_NUMBERS = {name: number for number, (name, _, _) in gguf._TYPES.items()}

# shape outermost first, type, bytes
Tensor = tuple[tuple[int, ...], str, bytes]


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor] = {}, alignment: int = 32
) -> bytes:
    """A whole file. Integers are uint32, of lists int32; floats have 32 bits."""
    out = pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    data = b""
    for name, (shape, type_name, content) in tensors.items():
        out += _string(name) + pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        out += pack("<IQ", TYPE_NUMBERS[type_name], len(data))
        data += content + bytes(-len(content) % alignment)
    return out + bytes(-len(out) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor] = {}) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def _string(text: str) -> bytes:
    content = text.encode()
    return pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return pack("<I?", BOOL, value)
    if isinstance(value, int):
        return pack("<II", UINT32, value) if value < 2**32 else pack("<IQ", UINT64, value)
    if isinstance(value, float):
        return pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return pack("<I", STRING) + _string(value)
    kind = type(value[0]) if value else int
    if kind is str:
        return pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    number, letter = {int: (INT32, "i"), float: (FLOAT32, "f"), bool: (BOOL, "?")}[kind]
    return pack(f"<IIQ{len(value)}{letter}", ARRAY, number, len(value), *value)
