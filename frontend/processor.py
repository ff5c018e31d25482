"""What this machine's processor can do, and which of the native kernels serve on it: in what type a
model runs best.

Must not know: torch, models. The native library itself is not asked: it is the engine's, and in a
child only that process has it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
NATIVE_BFLOAT16 = {"amx_bf16", "avx512_bf16"}
# What the native kernels' instruction sets are made of (kernels/cpu/native/src/run.cpp), the best
# first.
AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}
ISAS = {"amx": AVX512 | {"amx_tile", "amx_bf16", "amx_int8"}, "avx512": AVX512, "avx2": AVX2}
NATIVE_KERNELS = Path(__file__).parent.parent / "kernels" / "cpu" / "native"


def read_processor() -> tuple[str, set[str]]:
    """Its name, and the features that the system shows."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    return fields.get("model name") or platform.machine(), set(
        (fields.get("flags") or fields.get("Features") or "").split()
    )


def native_isas() -> list[str]:
    """The instruction sets of native kernels that this processor has, the best first."""
    _, present = read_processor()
    return [isa for isa, features in ISAS.items() if features <= present]


def are_kernels_built() -> bool:
    """Whether the engine will find a native library: as kernels/cpu/native/library.py looks for
    it.
    """
    choice = os.environ.get("QUIRE_NATIVE")
    return choice != "0" and (Path(choice) if choice else NATIVE_KERNELS / "_native.so").exists()


def prefers_bfloat16(cpu_isa: str) -> bool:
    """Whether bfloat16 is the faster type on this CPU: in hardware, or by native kernels (with
    `cpu_isa`), which widen it in registers and read half as much memory. torch's own kernels
    emulate it, and are then slower than in float32.
    """
    return bool(NATIVE_BFLOAT16 & read_processor()[1]) or (
        cpu_isa != "none" and are_kernels_built() and bool(native_isas())
    )
