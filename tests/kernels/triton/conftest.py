"""Which of these tests a process can run: kernels are decorated either for the interpreter or for
the compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

if find_spec("triton") is None:
    collect_ignore_glob = ["*"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["budgets/*", "test_*.py"]
else:
    collect_ignore_glob = ["interpreted/*"]


@pytest.fixture(scope="session", autouse=True)
def compiler_cache(tmp_path_factory) -> Iterator[None]:
    """A compiler cache that is removed with the tests and contains nothing of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(scope="session", autouse=True)
def interpreter(request, tmp_path_factory) -> Iterator[tuple[subprocess.Popen, Path] | None]:
    """The process that runs the interpreted tests, and the file of its output, if these tests are
    selected. It starts with the first test of this folder, so that it uses one core while the
    compiler's tests use another.
    """
    if not any(item.path.name == "test_interpreted.py" for item in request.session.items):
        yield None
        return
    output = tmp_path_factory.mktemp("interpreted") / "output.txt"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "tests/kernels/test_parity.py",
        "tests/kernels/test_state_rows.py",
        "tests/kernels/triton/interpreted",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    yield process, output
    process.kill()
    process.wait()
