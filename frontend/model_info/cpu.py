"""The CPU of this machine: its name, its features, the native kernels that run on it, and the
faster data type.

Must not know: torch, models. It does not load the native library, which may exist in the engine
process only.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ...ipc.operating_system import SYSTEM

NATIVE_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}
# CPU features that each instruction set of the native kernels requires
# (kernels/cpu/native/src/run.cpp), best first.
AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
AVX512_BF16 = AVX512 | {"avx512_bf16"}
NEON_DOTPROD = {"asimd", "asimddp"}
NEON_I8MM = NEON_DOTPROD | {"i8mm"}
ISAS = {
    "amx": AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": AVX512_BF16,
    "avx512": AVX512,
    "avx2": AVX2,
    "neon_bf16": NEON_I8MM | {"bf16"},
    "neon_i8mm": NEON_I8MM,
    "neon_dotprod": NEON_DOTPROD,
    "neon": {"asimd"},
}
NATIVE_KERNELS = Path(__file__).parents[2] / "kernels" / "cpu" / "native"


def read_processor() -> tuple[str, set[str]]:
    """Returns the CPU's name and the features that the operating system reports."""
    text = SYSTEM.processor_text()
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    return fields.get("model name") or platform.machine(), set(
        (fields.get("flags") or fields.get("Features") or "").split()
    )


def native_isas() -> list[str]:
    """Returns the instruction sets of the native kernels that this CPU supports, best first."""
    _, present = read_processor()
    return [isa for isa, features in ISAS.items() if features <= present]


def are_kernels_built() -> bool:
    """Returns whether the engine will find a native library, by the same rule as
    kernels/cpu/native/library.py.
    """
    choice = os.environ.get("QUIRE_NATIVE")
    return choice != "0" and (Path(choice) if choice else NATIVE_KERNELS / "_native.so").exists()


def prefers_bfloat16(cpu_isa: str) -> bool:
    """Returns whether bfloat16 is the faster data type on this CPU.

    It is if the hardware supports it, or if native kernels (`cpu_isa`) run, which widen it in
    registers and read half as much memory. torch's own kernels emulate it and are then slower than
    in float32.
    """
    return bool(NATIVE_BFLOAT16 & read_processor()[1]) or (
        cpu_isa != "none" and are_kernels_built() and bool(native_isas())
    )
