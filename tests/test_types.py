"""pyright (basic) finds no error in core, executor, frontend and ipc."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDERS = ("core", "executor", "frontend", "ipc")
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.types
@pytest.mark.timeout(600)
def test_pyright_finds_no_error() -> None:
    program = shutil.which("pyright")
    if program is None and find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install -e '.[test,types]'")
    command = [program] if program else [sys.executable, "-m", "pyright"]
    done = subprocess.run(
        [*command, "--level", "error", "--pythonpath", sys.executable, *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
