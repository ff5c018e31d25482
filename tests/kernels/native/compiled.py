"""Compiles the native library again for a test: with emulated instruction sets, or under a
sanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def compile_library(directory: Path, *flags: str) -> Path:
    """Compiles the library as pyproject.toml does, with further flags.

    Raises AssertionError with the compiler's messages.
    """
    [extension] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "ext-modules"
    ]
    base = [find_compiler(), *extension["extra-compile-args"], "-fPIC", *flags]

    def compile_one(source: str) -> str:
        out = directory / f"{Path(source).stem}.o"
        _run([*base, "-c", str(ROOT / source), "-o", str(out)])
        return str(out)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, extension["sources"]))
    library = directory / "_native.so"
    _run([*base, "-shared", *objects, "-o", str(library), "-pthread"])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[:4000]}"
