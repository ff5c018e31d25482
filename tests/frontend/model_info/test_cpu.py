"""The CPU's faster data type, determined by its features, the native library and the
configuration.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.frontend.model_info import cpu
from quire.ipc.operating_system import Linux

AVX512_BF16 = " ".join(sorted(cpu.AVX512_BF16))


@pytest.mark.parametrize(
    ("flags", "is_built", "native", "cpu_isa", "is_faster"),
    [
        ("fpu amx_bf16", False, None, "auto", True),
        ("avx512_bf16", True, None, "none", True),
        ("avx2 fma", True, None, "auto", True),
        ("avx2 fma", True, None, "avx2", True),
        ("avx2 fma", True, None, "none", False),
        ("avx2 fma", True, "0", "auto", False),
        ("avx2 fma", False, "cpuinfo", "auto", True),  # a library elsewhere
        ("avx2 fma", True, "nowhere.so", "auto", False),
        ("avx2 fma", False, None, "auto", False),
        ("sse2", True, None, "auto", False),
        (None, True, None, "auto", False),
    ],
)
def test_bfloat16(
    flags, is_built, native, cpu_isa, is_faster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    if is_built:
        (tmp_path / "_native.so").touch()
    monkeypatch.setattr(Linux, "processor_file", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu, "NATIVE_KERNELS", tmp_path)
    monkeypatch.delenv("QUIRE_NATIVE", raising=False)
    if native is not None:
        monkeypatch.setenv("QUIRE_NATIVE", native if native == "0" else str(tmp_path / native))
    assert cpu.prefers_bfloat16(cpu_isa) == is_faster


def test_instruction_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {AVX512_BF16} amx_bf16\n")
    monkeypatch.setattr(Linux, "processor_file", tmp_path / "cpuinfo")
    # the system does not provide tiles
    assert cpu.native_isas() == ["avx512_bf16", "avx512", "avx2"]


def test_the_frontend_detects_what_the_engine_does() -> None:
    from quire.kernels.cpu.native.library import library

    assert (cpu.are_kernels_built() and bool(cpu.native_isas())) == (library is not None)
    assert library is None or cpu.native_isas() == list(library.isas)
