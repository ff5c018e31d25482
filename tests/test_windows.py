"""What a user of Windows reads, in a process that takes its system for Windows."""

import subprocess
import sys

import pytest
from quire import NO_WINDOWS

PRETEND = "import sys; sys.platform = 'win32'; "


@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("import quire.__main__", f"quire: {NO_WINDOWS}"),
        ("from quire import LLM", f"ImportError: {NO_WINDOWS}"),
    ],
)
def test_the_message_names_the_linux_subsystem(code: str, last_line: str) -> None:
    command = [sys.executable, "-c", PRETEND + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == last_line
    assert "wsl --install" in last_line


def test_the_package_itself_can_be_imported() -> None:
    code = f"{PRETEND}import quire; print(quire.__version__)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
