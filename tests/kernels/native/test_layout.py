"""The structs that Python reads from the headers are those of the compiler: every member, its type,
place and size, and the constants; and they are filled by keyword.
"""

from __future__ import annotations

import ctypes
import subprocess

import pytest
from quire.kernels.cpu.native import calls, ranks
from quire.kernels.cpu.native.calls import F32, HEADERS, Op, Scale, Step, Struct
from quire.tests.kernels.native.compiled import ROOT, find_compiler

SOURCES = ROOT / "kernels/cpu/native/src"
SCALE = {"op": Op.SCALE, "dtype": F32, "rows": 1, "x": None, "x_row": 8, "size": 8, "factor": 2.0}
TYPES = {
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_double: "double",
}


def structs() -> dict[str, type[Struct]]:
    return {
        name: kind
        for name, kind in vars(calls).items()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind is not Struct
    }


def check(condition: str, what: str) -> str:
    return f'static_assert({condition}, "{what}");'


def checks_of(name: str, struct: type[Struct]) -> list[str]:
    found = [check(f"sizeof({name}) == {ctypes.sizeof(struct)}", f"size of {name}")]
    kinds = dict(
        field for base in reversed(struct.__mro__) for field in base.__dict__.get("_fields_", ())
    )
    for field in struct.names:
        member, at = f"{name}.{field}", getattr(struct, field)
        found.append(check(f"offsetof({name}, {field}) == {at.offset}", f"place of {member}"))
        found.append(check(f"sizeof({name}::{field}) == {at.size}", f"size of {member}"))
        of = f"std::remove_all_extents_t<decltype({name}::{field})>"
        kind = kinds[field]
        while issubclass(kind, ctypes.Array):
            kind = kind._type_
        is_as_read = (
            f"std::is_pointer_v<{of}>"
            if kind is ctypes.c_void_p
            else f"std::is_same_v<{of}, {TYPES[kind]}>"
        )
        found.append(check(is_as_read, f"type of {member}"))
    return found


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler to ask")
def test_the_compiler_reads_the_headers_as_python_does(tmp_path):
    checks = ["#include <cstddef>", "#include <type_traits>"]
    checks += [f'#include "{name}"' for name in HEADERS]
    for size in (1, 2, 62, 63, 64):
        num_bytes = ranks.header_bytes(size)
        checks.append(check(f"header_bytes({size}) == {num_bytes}", "header"))
    for name in ("MAX_EXPERTS", "MAX_LORA_SLICES", "LINE_BYTES", "LOST", "LATE"):
        checks.append(check(f"{name} == {getattr(calls, name)}", name))
    checks.append(check(f"QUIRE_ABI_VERSION == {calls.ABI_VERSION}", "version"))
    checks += [check(f"{name} == {getattr(calls, name)}", name) for name in ("BF16", "F32", "INT8")]
    checks += [check(f"OP_{op.name} == {op.value}", op.name) for op in Op]
    checks.append(check(f"NUM_OPS == {len(Op)}", "number of operations"))
    for enumeration in (calls.Ids, calls.Epilogue, calls.Gate):
        checks += [check(f"::{one.name} == {one.value}", one.name) for one in enumeration]
    for epilogue in calls.Epilogue:
        expected = str(calls.is_gated(epilogue)).lower()
        checks.append(check(f"is_gated({epilogue.name}) == {expected}", f"{epilogue.name} gates"))
    for name, struct in structs().items():
        checks += checks_of(name, struct)
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
    assert len(structs()) > 30 and len(checks) > 500


def test_every_struct_of_the_headers_is_read():
    """A declaration that the pattern misses would be absent without a word."""
    text = "".join((SOURCES / name).read_text() for name in HEADERS)
    declared = [line.split()[1] for line in text.splitlines() if line.startswith("struct ")]
    assert sorted(declared) == sorted(structs())


def test_a_struct_is_filled_by_keyword_with_all_its_fields_and_no_other():
    assert Scale(**SCALE).values() == SCALE
    with pytest.raises(TypeError, match=r"Scale: fields \['size'\] are missing"):
        Scale(**{name: value for name, value in SCALE.items() if name != "size"})
    with pytest.raises(TypeError, match=r"it has no \['sise'\]"):
        Scale(**SCALE, sise=8)
    with pytest.raises(TypeError, match="positional"):
        Scale(*SCALE.values())
    with pytest.raises(AttributeError, match="sise"):
        Scale(**SCALE).sise = 8
    with pytest.raises(AttributeError, match="tokens"):
        Step(tokens=8)


def test_a_declaration_that_cannot_be_read_is_an_error():
    for body in ("float x;", "int64_t* a, b, c;", "std::array<int, 2> x;", "int64_t x : 3;"):
        with pytest.raises(ValueError, match="cannot read the declaration"):
            calls._fields(body)
    assert calls._fields("const void* x;\n int64_t row[2][3], size;") == [
        ("x", ctypes.c_void_p),
        ("row", ctypes.c_int64 * 3 * 2),
        ("size", ctypes.c_int64),
    ]
