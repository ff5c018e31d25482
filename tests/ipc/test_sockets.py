"""Addresses, private directories, stale directories, and the listener's lock."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq
from quire.ipc.errors import InvalidParameterError, QuireError
from quire.ipc.sockets import (
    INPUT_SOCKET,
    MAX_PATH_BYTES,
    SocketDirectory,
    bind_listener,
    bind_pull,
    connect_push,
    ipc_path,
    listener_pid,
    make_context,
    receive,
    remove_stale_directories,
    runtime_directory,
)


@pytest.fixture
def base():
    """A short directory, since pytest's tmp_path may be too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="q") as name:
        yield Path(name)


@pytest.fixture
def context():
    with make_context() as made:
        yield made


def test_addresses():
    assert ipc_path("ipc:///a/b") == Path("/a/b")
    assert ipc_path("ipc://b.sock") == Path.cwd() / "b.sock"


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:1",
        "/a/b",
        "",
        "ipc://",
        "ipc://@name",
        "ipc://*",
        "ipc:///a/",
        "inproc://x",
    ],
)
def test_refused_addresses(address):
    with pytest.raises(InvalidParameterError) as caught:
        ipc_path(address, "listen")
    assert caught.value.parameter == "listen"


def test_the_longest_path_works_and_one_more_is_refused(base, context):
    path = base / ("x" * (MAX_PATH_BYTES - len(str(base)) - 1))
    bind_pull(context, f"ipc://{ipc_path(f'ipc://{path}')}", 100).close()
    with pytest.raises(InvalidParameterError, match="at most 107 bytes"):
        ipc_path(f"ipc://{path}x")


def test_the_directory_is_private_and_removed(base, monkeypatch, context):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    directory = SocketDirectory()
    assert directory.path.parent == base and directory.path.stat().st_mode & 0o777 == 0o700
    pull = bind_pull(context, directory.address(INPUT_SOCKET), 100)
    assert list(directory.path.iterdir())
    directory.remove()
    directory.remove()
    pull.close()
    assert list(base.iterdir()) == []


def test_an_unusable_directory_is_skipped(base, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "missing"))
    assert runtime_directory() == Path(tempfile.gettempdir())
    long = base / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert runtime_directory() == Path(tempfile.gettempdir())


def test_stale_directories_are_removed_and_others_stay(base, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    held = SocketDirectory()
    script = (
        "from quire.ipc.sockets import *; import os; d = SocketDirectory(); make_context(); "
        "print(d.path); os._exit(0)"
    )
    orphan = Path(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    strangers = base / "quire-client-strangers"
    strangers.mkdir()
    (strangers / "file").write_text("not ours")
    (base / "quire-mine").mkdir()  # a name that only resembles Quire's
    assert orphan.exists()
    assert remove_stale_directories(base) == 1
    assert (
        not orphan.exists()
        and held.path.exists()
        and (strangers / "file").exists()
        and (base / "quire-mine").exists()
    )
    held.remove()


def test_no_listener(base):
    assert listener_pid(base / "missing") is None


def test_one_listener_per_address(base, context):
    address = f"ipc://{base}/engine.sock"
    with bind_listener(context, address):
        path = ipc_path(address)
        assert path.stat().st_mode & 0o177 == 0
        assert listener_pid(path) == os.getpid()
        with pytest.raises(
            InvalidParameterError, match=f"another engine .pid {os.getpid()}. listens"
        ):
            bind_listener(context, address)


def test_a_dead_listeners_file_is_replaced(base, context):
    script = (
        "import sys, os; from quire.ipc.sockets import *; x = bind_listener(make_context(), "
        "sys.argv[1]); os._exit(0)"
    )
    address = f"ipc://{base}/engine.sock"
    subprocess.run([sys.executable, "-c", script, address], check=True)
    assert (base / "engine.sock").is_socket() and listener_pid(base / "engine.sock") is None
    with bind_listener(context, address):
        assert listener_pid(base / "engine.sock") == os.getpid()


def test_a_listener_does_not_replace_a_file(base, context):
    (base / "notes.txt").write_text("mine")
    with pytest.raises(InvalidParameterError, match="not a socket"):
        bind_listener(context, f"ipc://{base}/notes.txt")
    with pytest.raises(InvalidParameterError, match="not a directory"):
        bind_listener(context, f"ipc://{base}/missing/engine.sock")
    assert (base / "notes.txt").read_text() == "mine"


def test_no_usable_directory(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(QuireError, match="XDG_RUNTIME_DIR"):
        runtime_directory()


def test_receive_does_not_block(base, context):
    with bind_pull(context, f"ipc://{base}/a", 1000) as pull:
        assert receive(pull) is None
        with connect_push(context, f"ipc://{base}/a") as push:
            push.send_multipart([b"one", b"two"])
            assert pull.poll(5000) == zmq.POLLIN
            assert [bytes(frame) for frame in receive(pull)] == [b"one", b"two"]
