"""The parts of kernels/cpu/native/src/system.h for macOS, on this system: the pool of threads whose
sleep is a condition variable. No Mac has run it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from quire.tests.kernels.native.compiled import HERE, ROOT, find_compiler

SOURCES = ROOT / "kernels/cpu/native/src"

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def test_threads_that_sleep_at_a_condition_variable(tmp_path: Path) -> None:
    program = tmp_path / "pool"
    command = [find_compiler(), "-std=c++17", "-O1", "-DQUIRE_PORTABLE_SYSTEM", f"-I{SOURCES}"]
    files = [HERE / "portable_pool.cpp", SOURCES / "pool.cpp"]
    subprocess.run([*command, *files, "-o", program, "-pthread"], check=True)
    done = subprocess.run([program], check=False, timeout=120)
    assert done.returncode == 0, f"line {done.returncode} of {files[0]}"
