"""A daemon's listener: one per address, and who is admitted."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from quire.ipc.connection import Connection
from quire.ipc.errors import EngineStartError, InvalidParameterError
from quire.ipc.listener import (
    BadAttachError,
    Credentials,
    bind_listener,
    connect_to_daemon,
    credentials_of,
    listener_pid,
    read_attach,
    read_token,
)
from quire.ipc.sockets import ipc_path
from quire.tests.fake_engine import daemon, wait_until
from quire.tests.fakes import make_config

NOBODY = 65534
TOKEN = "a token of more than sixteen bytes"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@pytest.fixture
def base():
    """A directory that every user may enter, and which is short, since pytest's tmp_path may be too
    long for sockets.
    """
    with tempfile.TemporaryDirectory(prefix="q") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_no_listener(base):
    assert listener_pid(base / "missing") is None


def test_one_listener_per_address(base):
    address = f"ipc://{base}/engine.sock"
    with bind_listener(address):
        path = ipc_path(address)
        assert path.stat().st_mode & 0o777 == 0o600
        assert listener_pid(path) == os.getpid()
        with pytest.raises(
            InvalidParameterError, match=f"another engine .pid {os.getpid()}. listens"
        ):
            bind_listener(address)


def test_a_dead_listeners_file_is_replaced(base):
    script = (
        "import sys, os; from quire.ipc.listener import *; "
        "x = bind_listener(sys.argv[1]); os._exit(0)"
    )
    address = f"ipc://{base}/engine.sock"
    subprocess.run([sys.executable, "-c", script, address], check=True)
    assert (base / "engine.sock").is_socket() and listener_pid(base / "engine.sock") is None
    with bind_listener(address):
        assert listener_pid(base / "engine.sock") == os.getpid()


def test_a_listener_does_not_replace_a_file(base):
    (base / "notes.txt").write_text("mine")
    with pytest.raises(InvalidParameterError, match="not a socket"):
        bind_listener(f"ipc://{base}/notes.txt")
    with pytest.raises(InvalidParameterError, match="not a directory"):
        bind_listener(f"ipc://{base}/missing/engine.sock")
    assert (base / "notes.txt").read_text() == "mine"


def test_the_kernel_names_the_peer(base):
    with bind_listener(f"ipc://{base}/listener") as listener:
        with connect_to_daemon(f"ipc://{base}/listener") as own:
            assert credentials_of(own) == (os.getpid(), os.geteuid())
            program, _ = listener.accept()
            assert credentials_of(program) == (os.getpid(), os.geteuid())
            program.close()


def test_a_program_that_leaves_or_sends_something_else(base):
    with bind_listener(f"ipc://{base}/listener") as listener:
        with connect_to_daemon(f"ipc://{base}/listener"):
            program, _ = listener.accept()
        assert read_attach(program, None) is None
        program.close()
        with connect_to_daemon(f"ipc://{base}/listener") as own:
            program, _ = listener.accept()
            own.send(b"GET / HTTP/1.1")
            with pytest.raises(BadAttachError):
                read_attach(program, None)
            program.close()


def test_token_files(base):
    path = base / "token"
    path.touch(0o600)
    for text, problem in (("short", "16 to 4096"), ("x" * 5000, "16 to 4096")):
        path.write_text(text)
        with pytest.raises(InvalidParameterError, match=problem):
            read_token(str(path))
    path.write_text(TOKEN + "\n")
    assert read_token(str(path)) == TOKEN.encode()
    path.chmod(0o644)
    with pytest.raises(InvalidParameterError, match="every user may read"):
        read_token(str(path))
    with pytest.raises(InvalidParameterError, match="cannot be read: Is a directory"):
        read_token(str(base))


# ---------------------------------------------------------------- other users


def attach_as_nobody(address: str, token_file: Path | None) -> str:
    """The error of attaching as another user, or "served"."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            connection = Connection(2**20)
            connection.attach(address, None if token_file is None else str(token_file))
            said = "served" if connection.router.poll(60_000) else "no HELLO"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write_fd, said.encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def write_token(base: Path, name: str, token: str, uid: int = 0) -> Path:
    path = base / name
    path.touch(0o600)
    path.write_text(token)
    os.chown(path, uid, uid)
    return path


@needs_root
def test_another_user_without_a_token_file_at_the_daemon(base):
    with daemon(base, make_config()) as (address, process):
        assert "this user may not connect" in attach_as_nobody(address, None)
        (base / "engine.sock").chmod(0o666)  # as an operator may do
        mine = write_token(base, "mine", TOKEN, NOBODY)
        assert "serves its own user only, not user 65534" in attach_as_nobody(address, mine)
        assert process.poll() is None


@needs_root
def test_another_user_and_a_token(base):
    theirs = write_token(base, "theirs", TOKEN)
    right = write_token(base, "right", TOKEN, NOBODY)
    wrong = write_token(base, "wrong", TOKEN[::-1], NOBODY)
    with daemon(base, make_config(token_file=str(theirs))) as (address, process):
        wait_until(lambda: (base / "engine.sock").stat().st_mode & 0o777 == 0o666)
        assert "no token or a wrong one" in attach_as_nobody(address, None)
        assert "no token or a wrong one" in attach_as_nobody(address, wrong)
        assert attach_as_nobody(address, right) == "served"
        own = Connection(2**20)
        own.attach(address)  # the daemon's user needs no token
        own.close()
        assert process.poll() is None


@needs_root
def test_a_daemon_of_another_user_is_asked_only_with_a_token(base, monkeypatch):
    """Its address may be in a directory where every user can make a socket."""
    asked = []
    monkeypatch.setattr(
        "quire.ipc.connection.credentials_of", lambda listener: Credentials(1, NOBODY)
    )
    monkeypatch.setattr("quire.ipc.connection.attach", lambda *args: asked.append(args))
    with bind_listener(f"ipc://{base}/listener"):
        connection = Connection(2**20)
        with pytest.raises(EngineStartError, match="belongs to another user .65534."):
            connection.attach(f"ipc://{base}/listener")
        assert asked == []
        connection.close()
