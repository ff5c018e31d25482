"""The sockets between frontend and engine: addresses, their private directory, and their limits.

Must not know: messages, processes, or who is at the other end.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import zmq

from .errors import InvalidParameterError, QuireError

INPUT_SOCKET, OUTPUT_SOCKET = "input.sock", "output.sock"  # names in a client's directory
ENGINE_IDENTITY = b"engine"  # the only peer of a client's ROUTER
MAX_PATH_BYTES = 107  # sun_path of a unix socket has 108 bytes, the last one a NUL
DIRECTORY_PREFIX = "quire-client-"

# Messages that may wait on each side of an output connection; after that the engine's PUSH returns
# EAGAIN and ipc/engine_output.py counts.
OUTPUT_HIGH_WATER_MARK = 1000
# Of a daemon, which has two for each client. ZMQ's default is 1023.
MAX_DAEMON_SOCKETS = 65_536
# How long closing a socket waits for its last messages (Detach, EngineDead, the last outputs), in
# milliseconds.
LINGER_MS = 1000


# ---------------------------------------------------------------- addresses


def ipc_path(address: str, parameter: str = "engine") -> Path:
    """The file behind "ipc://PATH".

    Raises InvalidParameterError, naming `parameter`, for anything else.
    """
    scheme, _, path = address.partition("://")
    if scheme != "ipc":
        raise InvalidParameterError(
            parameter,
            f"must be ipc://PATH (Quire's processes do not listen on the network), got {address!r}",
        )
    # @ names a socket without a file, which no permission protects
    if not path or path[0] in "@*\0" or path.endswith("/"):
        raise InvalidParameterError(
            parameter, f"must name a file, as in ipc:///run/user/1000/quire.sock, got {address!r}"
        )
    absolute = Path(path).absolute()
    if (num_bytes := len(os.fsencode(absolute))) > MAX_PATH_BYTES:
        raise InvalidParameterError(
            parameter,
            f"a socket's path may have at most {MAX_PATH_BYTES} bytes, {str(absolute)!r} has "
            f"{num_bytes}",
        )
    return absolute


def listener_pid(path: Path) -> int | None:
    """The process that listens at this socket file; None if there is none; 0 if it is not visible
    here.

    A plain connection fails at once; a ZMQ socket would retry forever.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")


# ---------------------------------------------------------------- the private directory


class SocketDirectory:
    """A directory of mode 0700 for one client's sockets.

    Its owner holds a lock on it, so that others can tell when it is stale.
    """

    def __init__(self) -> None:
        self.path, self._lock_fd = _make_locked_directory()

    def address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """May be called twice."""
        remove_directory(self.path)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def remove_directory(path: Path) -> None:
    """Removes a socket directory and Quire's sockets in it. Keeps a directory with other files.

    May be called twice and concurrently.
    """
    try:
        for name in (INPUT_SOCKET, OUTPUT_SOCKET):
            (path / name).unlink(missing_ok=True)
        path.rmdir()
    except OSError:
        pass  # already removed, or owned by another user


def remove_stale_directories(base: Path) -> int:
    """Removes the directories in `base` that no process holds: both of their processes were killed.

    Returns how many.
    """
    num_removed = 0
    for path in base.glob(DIRECTORY_PREFIX + "*"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_directory(path)
            num_removed += not path.exists()
        except OSError:
            pass  # held by a living process
        finally:
            os.close(fd)
    return num_removed


def runtime_directory() -> Path:
    """The parent of socket directories: $XDG_RUNTIME_DIR, else the directory for temporary files.

    The first that can hold one.
    """
    tried = []
    for name in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if not name or not Path(name).is_absolute():
            continue
        longest = Path(name) / f"{DIRECTORY_PREFIX}12345678" / OUTPUT_SOCKET
        if os.access(name, os.W_OK | os.X_OK) and len(os.fsencode(longest)) <= MAX_PATH_BYTES:
            return Path(name)
        tried.append(name)
    raise QuireError(
        f"no directory for sockets: {', '.join(tried)} cannot be written, or have too long a path; "
        f"set XDG_RUNTIME_DIR"
    )


def _make_locked_directory() -> tuple[Path, int]:
    base = runtime_directory()
    remove_stale_directories(base)
    while True:
        path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=base))  # mode 0700
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if path.exists():
            return path, fd
        os.close(fd)  # another process removed it as stale before it was locked


# ---------------------------------------------------------------- sockets


def make_context(max_sockets: int | None = None) -> zmq.Context:
    context = zmq.Context(io_threads=1)
    if max_sockets is not None:
        context.set(zmq.MAX_SOCKETS, max_sockets)
    return context


def _make_socket(context: zmq.Context, kind: int, max_message_bytes: int) -> zmq.Socket:
    made = context.socket(kind)
    made.linger = LINGER_MS
    # A backstop that disconnects the peer. Senders therefore refuse such a message themselves
    # (codec.MessageTooLargeError).
    made.maxmsgsize = max_message_bytes
    return made


def bind_router(context: zmq.Context, address: str, max_message_bytes: int) -> zmq.Socket:
    """The client's end for requests.

    It never blocks and never drops: a request takes memory here until the engine has read it.
    """
    router = _make_socket(context, zmq.ROUTER, max_message_bytes)
    router.sndhwm = 0
    router.router_mandatory = True  # sending to an engine that is gone raises an error
    router.bind(address)
    return router


def bind_pull(context: zmq.Context, address: str, max_message_bytes: int) -> zmq.Socket:
    """The client's end for outputs."""
    pull = _make_socket(context, zmq.PULL, max_message_bytes)
    pull.rcvhwm = OUTPUT_HIGH_WATER_MARK
    pull.bind(address)
    return pull


def connect_dealer(context: zmq.Context, address: str, max_message_bytes: int) -> zmq.Socket:
    """The engine's end for requests. Its input thread always reads."""
    dealer = _make_socket(context, zmq.DEALER, max_message_bytes)
    dealer.identity = ENGINE_IDENTITY
    dealer.connect(address)
    return dealer


def connect_push(context: zmq.Context, address: str) -> zmq.Socket:
    """The sending end: an engine's outputs, or a program's Attach to a daemon."""
    # it receives nothing; a limit would affect the handshake
    push = _make_socket(context, zmq.PUSH, -1)
    push.sndhwm = OUTPUT_HIGH_WATER_MARK
    push.connect(address)
    return push


def bind_listener(context: zmq.Context, address: str) -> zmq.Socket:
    """A daemon's listener for Attach messages.

    Replaces the file of a dead daemon. Refuses that of a living one, and a file that is not a
    socket.
    """
    path = ipc_path(address, "listen")
    if not path.parent.is_dir():
        raise InvalidParameterError("listen", f"{path.parent} is not a directory")
    # two daemons that start at the same time must not both take the address
    with _directory_lock(path.parent):
        if path.exists() and not path.is_socket():
            raise InvalidParameterError("listen", f"{path} is a file, not a socket")
        if (pid := listener_pid(path)) is not None:
            raise InvalidParameterError(
                "listen", f"another engine (pid {pid}) listens at {address}"
            )
        listener = _make_socket(context, zmq.PULL, 64 * 1024)
        umask = os.umask(0o177)  # write permission on the socket gives access to the engine
        try:
            listener.bind(f"ipc://{path}")
        finally:
            os.umask(umask)
    return listener


@contextmanager
def _directory_lock(path: Path, timeout_s: float = 5.0):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise QuireError(f"{path} is locked by another process") from error
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def receive(source: zmq.Socket) -> list[zmq.Frame] | None:
    """The next message's frames, not copied, or None if there is none yet."""
    try:
        return source.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
