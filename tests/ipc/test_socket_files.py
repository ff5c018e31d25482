"""Files of Unix sockets: each process removes only its own."""

import os
import socket
import threading
from pathlib import Path

import pytest
from quire.ipc.errors import QuireError
from quire.ipc.socket_files import SocketFile, directory_lock


def bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    return listener


def test_a_process_removes_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with bound(path):
        SocketFile(path).remove()
    assert not path.exists()


def test_a_process_leaves_the_file_of_its_successor(tmp_path: Path) -> None:
    """Whose inode may have the number of the first one, unless somebody holds that."""
    path = tmp_path / "socket"
    with bound(path):
        own = SocketFile(path)
    path.unlink()
    with bound(path):
        own.remove()
        assert path.is_socket()


def test_a_file_that_somebody_has_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with bound(path):
        own = SocketFile(path)
    path.unlink()
    num_open = len(os.listdir("/proc/self/fd"))
    own.remove()
    assert len(os.listdir("/proc/self/fd")) == num_open - 1


def test_one_process_holds_the_lock(tmp_path: Path) -> None:
    with directory_lock(tmp_path):
        with pytest.raises(QuireError, match="is locked"), directory_lock(tmp_path, 0.05):
            pass
        taken = threading.Event()

        def wait() -> None:
            with directory_lock(tmp_path):
                taken.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not taken.wait(0.05)
    waiting.join()
    assert taken.is_set()
