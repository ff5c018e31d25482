"""Reads the structs, enumerations and constants of the library's C interface from its headers.

Must not know: what an operation computes (kernels/ops.py), tensors.

A struct of src/abi*.h is a class of this module with the same name, filled by keyword:

    struct Scale : Call { void* x; int64_t x_row, size; double factor; };
    Scale(op=Op.SCALE, dtype=F32, rows=4, x=address, x_row=64, size=64, factor=2.0)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ctypes import Array, Structure, addressof, c_double, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

HEADERS = (
    "abi.h",
    "abi_altup.h",
    "abi_experts.h",
    "abi_images.h",
    "abi_latents.h",
    "abi_lora.h",
    "abi_ranks.h",
    "abi_states.h",
)
ALL_TOKENS, ALL_LOGITS = -1, -2  # values of `rows`: the step's num_tokens, the step's num_logits

_TYPES: dict[str, type] = {"int32_t": c_int32, "int64_t": c_int64, "double": c_double}
_SOURCES = Path(__file__).with_name("src")
_text = re.sub(r"//.*", "", "\n".join((_SOURCES / name).read_text() for name in HEADERS))


def _fields(body: str) -> list[tuple[str, type]]:
    """Returns the fields that the body of a struct declares. Raises ValueError for what it cannot
    read.
    """
    fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        parts = re.fullmatch(r"(?:const )?(\w+)\s*(\**)\s+?(\w.*)", declaration, re.DOTALL)
        for declared in parts[3].split(",") if parts else [declaration]:
            name = re.fullmatch(r"\s*(\w+)((?:\[\d+\])*)\s*", declared)
            is_known = parts and ("," not in parts[3] if parts[2] else parts[1] in _TYPES)
            if parts is None or name is None or not is_known:
                raise ValueError(f"{HEADERS}: cannot read the declaration {declaration!r}")
            kind: Any = c_void_p if parts[2] else _TYPES[parts[1]]
            for size in reversed(re.findall(r"\d+", name[2])):
                kind = kind * int(size)
            fields.append((name[1], kind))
    return fields


def _enum(name: str) -> dict[str, int]:
    """Returns the members of an enumeration. A member without a value follows the one before it."""
    found = re.search(rf"enum {name} : \w+ \{{(.*?)\}};", _text, re.DOTALL)
    assert found is not None, name
    members: dict[str, int] = {}
    for member, value in re.findall(r"(\w+)(?: = (\d+))?", found[1]):
        members[member] = int(value) if value else next(reversed(members.values())) + 1
    return members


_structs = {
    name: (base, _fields(body))
    for name, base, body in re.findall(r"struct (\w+)(?: : (\w+))? \{(.*?)\};", _text, re.DOTALL)
}


class Struct(Structure):
    """A struct of a header. Its constructor raises TypeError unless it is given every field, and
    nothing else, by keyword.
    """

    __slots__ = ()
    names: ClassVar[tuple[str, ...]] = ()  # of all fields, those of the base first
    pointers: ClassVar[tuple[str, ...]] = ()  # the names of fields that are addresses
    # strides has (field, operand, dimension) of the fields that are strides, such as x_row and
    # x_head of x.
    strides: ClassVar[tuple[tuple[str, str, int], ...]] = ()
    _all: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        own = dict(_structs[cls.__name__][1])
        cls.names += tuple(own)
        cls.pointers += tuple(name for name, kind in own.items() if kind is c_void_p)
        cls.strides += tuple(
            (operand + ending, operand, dimension)
            for dimension, ending in enumerate(("_row", "_head"))
            for operand in cls.pointers
            if operand + ending in own
        )
        cls._all = frozenset(cls.names)

    def __init__(self, **values: Any):
        if values.keys() != self._all:
            unknown = [name for name in values if name not in self.names]
            missing = [name for name in self.names if name not in values]
            raise TypeError(
                f"{type(self).__name__}: fields {missing} are missing, and it has no {unknown}"
            )
        super().__init__(**values)

    @classmethod
    def zeros(cls) -> Any:
        """Returns a struct whose fields are set later."""
        return cls.__new__(cls)

    def values(self) -> dict[str, Any]:
        """Returns all fields, as the constructor takes them."""
        return {name: getattr(self, name) for name in self.names}

    if TYPE_CHECKING:  # the fields

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


class Step(Struct):
    """The inputs of one step. An operation is given the fields that it reads; others are 0."""

    __slots__ = ()
    _fields_ = _structs["Step"][1]

    def __init__(self, **values: Any):
        Structure.__init__(self, **values)  # raises AttributeError for a name that is no field


class Call(Struct):
    """One operation with the addresses of its operands: the base of the other structs."""

    __slots__ = ("origin",)
    _fields_ = _structs["Call"][1]

    def __init__(self, **values: Any):
        super().__init__(**values)
        self.origin: Any = (
            None  # what a Recorder's `origin` says of a recorded call; not in the struct
        )


class CallList:
    """Calls that run one after another. The list keeps them alive."""

    def __init__(self, calls: Iterable[Call]):
        self.calls = list(calls)
        self.pointers: Array = (c_void_p * len(self.calls))(*map(addressof, self.calls))


_EPILOGUES = _enum("Epilogue")


def is_gated(epilogue: int) -> bool:
    """Returns whether a linear layer with the epilogue has half as many results as outputs."""
    return _EPILOGUES["GATED"] <= epilogue <= _EPILOGUES["GATED_GELU"]


def _constant(name: str) -> int:
    found = re.search(rf"\b{name}(?: =)? (\d+)", _text)
    assert found is not None, name
    return int(found[1])


ABI_VERSION = _constant("QUIRE_ABI_VERSION")
MAX_EXPERTS = _constant("MAX_EXPERTS")
MAX_STREAMS = _constant("MAX_STREAMS")
MAX_LORA_SLICES = _constant("MAX_LORA_SLICES")
LINE_BYTES = _constant("LINE_BYTES")
LOST, LATE = _constant("LOST"), _constant("LATE")
BF16, F32, INT8 = _enum("Dtype").values()

if TYPE_CHECKING:  # the other structs, and the enumerations

    def __getattr__(name: str) -> Any: ...


_StructType: Any = type(Struct)
for _name, (_base, _own) in _structs.items():
    if _name not in globals():
        _members = {"__slots__": (), "_fields_": _own}
        globals()[_name] = _StructType(_name, (globals()[_base or "Struct"],), _members)
_ops = {n.removeprefix("OP_"): v for n, v in _enum("Op").items() if n != "NUM_OPS"}
_enums = {name: _enum(name) for name in ("Ids", "Absent", "Epilogue", "Gate")}
for _name, _own in ({"Op": _ops} | _enums).items():
    globals()[_name] = IntEnum(_name, _own, module=__name__)
