"""Folders for sockets: paths that are too long, and folders that a killed process has left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from quire.frontend.supervision.socket_folder import SocketFolder
from quire.ipc.errors import InvalidParameterError

KILLED = """
import os, signal
from quire.frontend.supervision.socket_folder import SocketFolder
folder = SocketFolder("quire-one-", "short")
(folder.path / "socket").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_too_long_for_sockets_is_refused(temporary: Path) -> None:
    folder = SocketFolder("quire-", "short")
    assert folder.path.parent == temporary
    with pytest.raises(InvalidParameterError, match="TMPDIR: .* at most .* bytes"):
        SocketFolder("quire-", "x" * 90)
    assert list(temporary.iterdir()) == [folder.path]
    folder.remove()
    assert not list(temporary.iterdir())


def test_the_next_one_removes_what_a_killed_process_has_left(temporary: Path) -> None:
    others = [SocketFolder(prefix, "short") for prefix in ("quire-one-", "quire-two-")]
    kept = {one.path for one in others}
    for name in ("no-lock", "one-without"):  # of programs that make no lock
        kept.add(temporary / f"quire-{name}")
        (temporary / f"quire-{name}").mkdir()
    environment = {"TMPDIR": str(temporary)}
    process = subprocess.run([sys.executable, "-c", KILLED], env=environment)
    assert process.returncode == -9
    [left] = {*temporary.iterdir()} - kept
    another = SocketFolder("quire-two-", "short")
    assert left.is_dir()
    folder = SocketFolder("quire-one-", "short")
    assert {*temporary.iterdir()} == {*kept, another.path, folder.path}
    for one in (*others, another, folder):
        one.remove()
