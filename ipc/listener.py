"""The listener of a daemon: a socket file where programs ask to be served, and how another daemon
takes it over.

Must not know: requests, ZMQ, or what serving a program takes.

    program   connect ─▶ Attach ─▶ Answer: Served, or a sentence why not
    daemon    accept ─▶ user, token, version ─▶ Answer; the connection stays open while it serves
              TurnedAway: it releases an idle program to make room for another

Each side learns from the end of the connection that the other is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .errors import EngineStartError, InvalidParameterError, QuireError
from .messages import PROTOCOL, Attach, Served, TurnedAway
from .operating_system import SYSTEM, Credentials, is_bound
from .socket_files import directory_lock
from .sockets import Wire, ipc_path

TOKEN_VARIABLE = "QUIRE_TOKEN_FILE"
MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 4096
MAX_ATTACH_BYTES = 8192
ATTACH_TIMEOUT_S = 5.0  # how long a program may take to send its Attach
ANSWER_TIMEOUT_S = 10.0  # of a daemon, whose input thread answers at once
CLOSE_TIMEOUT_S = 10.0  # of a daemon, whose input thread closes the listener at once
LISTEN_GRACE_S = 0.5  # how long a socket file may exist before it has a listener

_LENGTH = struct.Struct("=H")
_encode = msgspec.msgpack.Encoder().encode
_decode_attach = msgspec.msgpack.Decoder(Attach).decode
_decode_answer = msgspec.msgpack.Decoder(Served | TurnedAway).decode
_decode_release = msgspec.msgpack.Decoder(TurnedAway).decode


def credentials_of(connection: socket.socket) -> Credentials:
    """For a connection to a listener: the process that called listen()."""
    return SYSTEM.credentials_of(connection)


def network_namespace() -> int:
    """Names without a file are those of one network namespace."""
    return SYSTEM.network_namespace()


def read_token(path: str, parameter: str = "token_file") -> bytes:
    """Raises InvalidParameterError for a file that cannot be read, that every user may read, or
    that holds no token.
    """
    try:
        with open(path, "rb") as file:
            is_public = os.fstat(file.fileno()).st_mode & 0o004
            token = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise InvalidParameterError(parameter, f"{path} cannot be read: {error.strerror}") from None
    if is_public:
        raise InvalidParameterError(parameter, f"every user may read {path}; chmod o-r {path}")
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise InvalidParameterError(
            parameter,
            f"{path} must hold a token of {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes, it has "
            f"{len(token)}",
        )
    return token


# ---------------------------------------------------------------- the program's side


def connect_to_daemon(address: str) -> socket.socket:
    """Raises EngineStartError if nothing listens at `address`."""
    path = ipc_path(address)
    # A daemon's file exists shortly before the daemon listens, and scripts wait for the file.
    deadline = time.monotonic() + LISTEN_GRACE_S
    while True:
        connection = _socket()
        try:
            connection.connect(str(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if not path.exists() or time.monotonic() > deadline:
                raise EngineStartError(
                    f"no engine listens at {address}; start one with: quire engine --listen "
                    f"{address}"
                ) from None
        except PermissionError:
            connection.close()
            raise EngineStartError(
                f"this user may not connect to {address}; an engine serves other users with "
                f"--token-file"
            ) from None
        except OSError as error:  # another kind of socket
            connection.close()
            raise EngineStartError(
                f"no engine of this version listens at {address} ({error.strerror})"
            ) from None
        time.sleep(0.01)


def attach(connection: socket.socket, wire: Wire, token: bytes) -> Served:
    """Asks the daemon to serve this program. Raises EngineStartError with the daemon's reason if
    it does not.
    """
    attach = Attach(PROTOCOL, wire.name, wire.key, network_namespace(), token)
    connection.settimeout(ANSWER_TIMEOUT_S)
    try:
        connection.send(_packet(connection, attach))
        data = _receive(connection)
    except TimeoutError:
        raise EngineStartError(f"the engine did not answer within {ANSWER_TIMEOUT_S:g} s") from None
    except OSError:
        data = b""
    try:
        answer = _decode_answer(data)
    except msgspec.MsgspecError:
        raise EngineStartError(
            "the engine closed the connection" if not data else "it is not an engine's socket"
        ) from None
    if isinstance(answer, TurnedAway):
        raise EngineStartError(answer.cause)
    return answer


def release_reason(connection: socket.socket) -> str | None:
    """Why the daemon has released this program; None: it has ended."""
    try:
        return _decode_release(_receive(connection, socket.MSG_DONTWAIT)).cause
    except (OSError, msgspec.MsgspecError):
        return None


# ---------------------------------------------------------------- the daemon's side


class Refusal(Exception):
    """A program is not served; the text, which is sent to it, says why."""


class BadAttachError(Exception):
    """What a program sent is not an Attach."""


def bind_listener(address: str, *, is_for_all_users: bool = False) -> socket.socket:
    """A daemon's listener.

    Replaces the file of a dead daemon. Refuses that of a living one, and a file that is not a
    socket.
    """
    path = ipc_path(address, "listen")
    if not path.parent.is_dir():
        raise InvalidParameterError("listen", f"{path.parent} is not a directory")
    with directory_lock(path.parent):
        if path.exists() and not path.is_socket():
            raise InvalidParameterError("listen", f"{path} is a file, not a socket")
        if (pid := listener_pid(path)) is not None:
            raise InvalidParameterError(
                "listen", f"another engine (pid {pid}) listens at {address}"
            )
        path.unlink(missing_ok=True)
        listener = _socket()
        umask = os.umask(0o177)  # write permission on the file is what lets a program connect
        try:
            listener.bind(str(path))
            if is_for_all_users:
                path.chmod(0o666)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(umask)
    listener.setblocking(False)
    return listener


def listener_pid(path: Path) -> int | None:
    """The process that listens at this socket file; None if there is none; 0 if it is not visible
    here.
    """
    kinds = {SYSTEM.local_socket: None, socket.SOCK_STREAM: None}  # STREAM: another program's
    for kind in kinds:
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except FileNotFoundError:
                return None
            except ConnectionRefusedError:
                return 0 if is_bound(path) else None
            except OSError:
                continue
            return credentials_of(probe).pid
    return 0


@contextlib.contextmanager
def taken_over(path: Path) -> Iterator[None]:
    """Inside, the daemon that listened at this socket file listens no more; bind the address there.
    It ends with the context, in the middle of its requests, which its clients submit to the
    daemon that they then find.

    Raises QuireError if it cannot be asked. Does nothing if none listens.
    """
    if (pid := listener_pid(path)) is None:
        yield
        return
    if pid == 0:
        raise QuireError(f"the engine that listens at {path} cannot be seen (another container?)")
    with SYSTEM.signals_to(pid) as send_signal:
        send_signal(signal.SIGTERM)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        # 0: the kernel tells no pid, because the listener's queue is full
        while listener_pid(path) in (pid, 0):
            if time.monotonic() > deadline:
                raise QuireError(f"the engine at {path} (pid {pid}) does not stop listening")
            time.sleep(0.005)
        yield
        with contextlib.suppress(ProcessLookupError):  # it had no requests
            send_signal(signal.SIGTERM)


def read_attach(connection: socket.socket, token: bytes | None) -> Attach | None:
    """What a program asks for; None if it has left.

    `token`: what another user must know; None: other users are refused. Raises Refusal, and
    BadAttachError for anything but an Attach.
    """
    try:
        data = _receive(connection)
    except OSError:
        data = b""
    if not data:
        return None
    try:
        attach = _decode_attach(data)
    except Exception as error:  # as in codec.MessageDecoder.decode: any bytes are possible here
        raise BadAttachError(str(error)) from None
    if attach.protocol != PROTOCOL:
        raise Refusal(
            f"the engine speaks protocol {PROTOCOL}, this program {attach.protocol}: their "
            f"versions of quire differ"
        )
    if not Wire(attach.wire_name, attach.key).is_valid():
        raise BadAttachError("no wire")
    uid = credentials_of(connection).uid
    if uid not in (os.geteuid(), 0):
        if token is None:
            raise Refusal(
                f"the engine serves its own user only, not user {uid}; --token-file admits others"
            )
        if not hmac.compare_digest(token, attach.token):
            raise Refusal(
                f"user {uid} has sent no token or a wrong one; name the engine's file with "
                f"token_file or {TOKEN_VARIABLE}"
            )
    if attach.network_namespace != network_namespace():
        raise Refusal(
            "the engine and this program are in different network namespaces (two containers, or "
            "PrivateNetwork= of a systemd unit)"
        )
    return attach


def send_answer(connection: socket.socket, message: Served | TurnedAway) -> None:
    """Does not block. A program that has left or does not read gets nothing."""
    try:
        connection.send(_packet(connection, message), socket.MSG_DONTWAIT)
    except OSError:
        pass


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, SYSTEM.local_socket)


def _packet(connection: socket.socket, message: Attach | Served | TurnedAway) -> bytes:
    """What is sent for a message. A socket that does not keep the bounds of messages is told them.

    A message is sent by one call and received whole: it is smaller than the system's buffers.
    """
    data = _encode(message)
    if connection.type == socket.SOCK_STREAM:
        return _LENGTH.pack(len(data)) + data
    return data


def _receive(connection: socket.socket, flags: int = 0) -> bytes:
    """The bytes of a message; fewer if the other end is gone."""
    if connection.type != socket.SOCK_STREAM:
        return connection.recv(MAX_ATTACH_BYTES, flags)
    head = connection.recv(_LENGTH.size, flags)
    if len(head) < _LENGTH.size:
        return b""
    return connection.recv(min(_LENGTH.unpack(head)[0], MAX_ATTACH_BYTES), flags)
