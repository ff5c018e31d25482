"""Compiles the native library again for a test: with emulated instruction sets, or under a
sanitizer.

    python -P -m quire.tests.kernels.native.compiled DIRECTORY PID

compiles the one with emulated instruction sets, and removes it when the process PID has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent

# Headers that the emulated intrinsics need, included outside the kernels' namespaces.
EMULATED = (
    "-DQUIRE_EMULATED",
    f"-I{HERE}",
    "-include",
    "limits",
    "-include",
    "cstdio",
    "-include",
    "cstdlib",
    "-Wno-ignored-attributes",
)


def find_compiler() -> str | None:
    """g++, because the emulation relies on its name look-up of intrinsics."""
    return shutil.which(os.environ.get("CXX", "g++"))


def compile_library(
    directory: Path,
    *flags: str,
    compiler: str | None = None,
    parent_pid: int | None = None,
    instead: Mapping[str, Path] = MappingProxyType({}),  # files, by the names of sources
) -> Path:
    """Compiles the library as pyproject.toml does, with further flags, while `parent_pid` lives.
    `compiler`: find_compiler() by default.

    Raises AssertionError with the compiler's messages.
    """
    [extension] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "ext-modules"
    ]
    base = [compiler or find_compiler(), *extension["extra-compile-args"], "-fPIC", *flags]
    base.append(f"-I{ROOT / 'kernels/cpu/native/src'}")

    def compile_one(source: str) -> str:
        if parent_pid is not None:
            os.kill(parent_pid, 0)  # raises ProcessLookupError if it has ended
        out = directory / f"{Path(source).stem}.o"
        path = instead.get(Path(source).name, ROOT / source)
        _run([*base, "-c", str(path), "-o", str(out)])
        return str(out)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, extension["sources"]))
    library = directory / "_native.so"
    _run([*base, "-shared", *objects, "-o", str(library), "-pthread"])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[:4000]}"


# ---------------------------------------------------------------- beside other tests


def begin_emulated(config: pytest.Config) -> Path:
    """Compiles the library with emulated instruction sets on what other tests leave of the cores,
    once for all workers of pytest-xdist; returns its directory, which lives as long as the run.

    The compiler is no child of this process: tests count those.
    """
    worker = getattr(config, "workerinput", {"testrunuid": uuid.uuid4().hex, "workerid": "gw0"})
    directory = Path(tempfile.gettempdir()) / f"quire-emulated-{worker['testrunuid']}"
    if worker["workerid"] != "gw0":
        return directory
    directory.mkdir()
    command = [sys.executable, "-P", "-m", "quire.tests.kernels.native.compiled"]
    start = 'setsid nice -n 10 "$@" </dev/null >/dev/null 2>&1 &'
    pid = os.getppid() if hasattr(config, "workerinput") else os.getpid()
    subprocess.run(["sh", "-c", start, "sh", *command, str(directory), str(pid)], check=True)
    return directory


def finish_emulated(directory: Path) -> Path:
    """Waits for what begin_emulated began; returns the library.

    Raises AssertionError with the compiler's messages.
    """
    result = directory / "result"
    while not result.exists():
        time.sleep(0.1)
    assert (problem := result.read_text()) == "", problem
    return directory / "_native.so"


def main(directory: Path, pid: int) -> None:
    """Compiles it, and removes the directory when the process `pid` has ended."""
    problem = ""
    try:
        instead = {"isa_avx2.cpp": HERE / "without_avx2.cpp"}
        compile_library(directory, *EMULATED, "-O1", parent_pid=pid, instead=instead)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    (directory / "unread").write_text(problem)
    (directory / "unread").replace(directory / "result")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
