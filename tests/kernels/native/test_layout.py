"""The structs in Python equal those of the library: names, order, types, sizes, offsets."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest
from quire.kernels.cpu.native import calls, draft_calls, lora_calls, rank_calls
from quire.tests.kernels.native.compiled import ROOT, find_compiler

SOURCES = ROOT / "kernels/cpu/native/src"
HEADERS = ("abi.h", "abi_lora.h", "abi_drafts.h", "abi_ranks.h")
HEADER = "".join(re.sub(r"//.*", "", (SOURCES / name).read_text()) for name in HEADERS)
STRUCTS = re.findall(r"struct (\w+)(?: : (\w+))? \{(.*?)\};", HEADER, re.DOTALL)
TYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def fields_in_header(body: str) -> list[tuple[str, type]]:
    fields = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        ctype, names = re.fullmatch(
            r"((?:const )?\w+\s*\**)\s*(\w.*)", declaration, re.DOTALL
        ).groups()
        as_python = ctypes.c_void_p if "*" in ctype else TYPES[ctype.strip()]
        fields += [in_array(name, as_python) for name in names.split(",")]
    return fields


def in_array(name: str, of: type) -> tuple[str, type]:
    name, *sizes = re.findall(r"\w+", name)
    for size in reversed(sizes):
        of = of * int(size)
    return name, of


def structs_in_python() -> dict[str, type[ctypes.Structure]]:
    return {
        n: t
        for of in (calls, lora_calls, draft_calls, rank_calls)
        for n, t in vars(of).items()
        if isinstance(t, type) and issubclass(t, ctypes.Structure) and t is not ctypes.Structure
    }


def offsets(struct: type[ctypes.Structure]) -> dict[str, int]:
    """Offsets of all fields, inherited ones included."""
    names = [
        name for base in reversed(struct.__mro__) for name, _ in base.__dict__.get("_fields_", ())
    ]
    return {name: getattr(struct, name).offset for name in names}


def test_every_struct_is_on_both_sides():
    assert [name for name, _, _ in STRUCTS] == list(structs_in_python())


@pytest.mark.parametrize(("name", "base", "body"), STRUCTS, ids=[name for name, _, _ in STRUCTS])
def test_fields(name, base, body):
    struct = structs_in_python()[name]
    assert struct.__bases__ == (structs_in_python()[base] if base else ctypes.Structure,)
    assert list(struct._fields_) == fields_in_header(body)


def test_operations_and_constants():
    names = re.findall(r"OP_(\w+)", re.search(r"enum Op .*?\{(.*?)\}", HEADER, re.DOTALL).group(1))
    assert names == [op.name for op in sorted(calls.Op)] and sorted(calls.Op) == list(
        range(len(names))
    )
    assert int(re.search(r"QUIRE_ABI_VERSION (\d+)", HEADER).group(1)) == calls.ABI_VERSION
    assert {
        n: int(v)
        for n, v in re.findall(r"(\w+) = (\d+)", re.search(r"enum Dtype .*?\}", HEADER).group())
    } == {"BF16": calls.BF16, "F32": calls.F32, "INT8": calls.INT8}


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler to ask")
def test_the_compiler_lays_them_out_as_ctypes_does(tmp_path):
    checks = ["#include <cstddef>", *(f'#include "{name}"' for name in HEADERS)]
    for size in (1, 2, 62, 63, 64):
        num_bytes = rank_calls.header_bytes(size)
        checks.append(f'static_assert(header_bytes({size}) == {num_bytes}, "header");')
    checks.append(
        f"static_assert(LINE_BYTES == {rank_calls.LINE_BYTES} && LOST == {rank_calls.LOST}"
        f' && LATE == {rank_calls.LATE}, "lines");'
    )
    for name, struct in structs_in_python().items():
        checks.append(
            f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size of {name}");'
        )
        checks += [
            f'static_assert(offsetof({name}, {field}) == {at}, "{name}.{field}");'
            for field, at in offsets(struct).items()
        ]
    (tmp_path / "layout.cpp").write_text("\n".join(checks))
    command = [
        find_compiler(),
        "-std=c++17",
        "-Wno-invalid-offsetof",
        "-fsyntax-only",
        f"-I{SOURCES}",
        "layout.cpp",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(checks) > 50
