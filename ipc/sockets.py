"""The sockets between frontend and engine: addresses, keys and limits.

Must not know: messages, processes, or who is at the other end.

A client's two sockets have a random name and no file, so nothing of them can outlive their process.
On macOS they have files, and the next client removes those of a process that was killed. Every
user may connect to such a name. What protects them is CURVE: the client's ends are CURVE
servers with a new key pair each time, and only the engine receives the public key. Without it a
peer cannot complete the handshake.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from .errors import InvalidParameterError, QuireError
from .operating_system import SYSTEM

ENGINE_IDENTITY = b"engine"  # the only peer of a client's ROUTER
MAX_PATH_BYTES = SYSTEM.max_path_bytes  # of a unix socket
WIRE_FILES = f"quire-{32 * '[0-9a-f]'}-*put"  # where the sockets of a wire have files
KEY_BYTES = 40  # of a key as ZMQ writes it (Z85)

# Messages that may wait on each side of an output connection; after that the engine's PUSH returns
# EAGAIN and ipc/engine_output.py counts.
OUTPUT_HIGH_WATER_MARK = 1000
# A daemon has two sockets for each client. ZMQ's default is 1023.
MAX_DAEMON_SOCKETS = 65_536
# How long closing a socket waits for its last messages (Detach, EngineDead, the last outputs), in
# milliseconds.
LINGER_MS = 1000
POLLIN = int(zmq.POLLIN)  # arithmetic with ZMQ's own flags is slow


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
    # @ names a socket without a file, which no permission protects; * lets ZMQ choose
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


def replica_address(address: str, index: int) -> str:
    """The address of one of a daemon's engines: the first one has the daemon's own."""
    return f"{address}.{index}" if index else address


# ---------------------------------------------------------------- names and keys


class Wire(NamedTuple):
    """What an engine must know to connect to a client."""

    name: str  # of both sockets
    key: bytes  # the client's public key, a secret between the two

    @property
    def input_address(self) -> str:
        return SYSTEM.socket_address(f"quire-{self.name}-input")

    @property
    def output_address(self) -> str:
        return SYSTEM.socket_address(f"quire-{self.name}-output")

    def is_valid(self) -> bool:
        """Whether it has the form that make_wire gives it; another program may have sent it."""
        return (
            re.fullmatch("[0-9a-f]{32}", self.name) is not None
            and re.fullmatch(rb"[!-~]{40}", self.key) is not None
        )


def make_wire() -> tuple[Wire, bytes]:
    """Returns a new wire and the secret key of the client's end."""
    if not zmq.has("curve"):
        raise QuireError(
            "this build of ZMQ has no CURVE, which protects the engine's sockets; the wheels of "
            "pyzmq on PyPI have it"
        )
    SYSTEM.remove_unused_sockets(WIRE_FILES)
    public_key, secret_key = zmq.curve_keypair()
    return Wire(secrets.token_hex(16), public_key), secret_key


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


def make_router(context: zmq.Context, secret_key: bytes, max_message_bytes: int) -> zmq.Socket:
    """The client's end for requests, to be bound.

    It never blocks and never drops: a request takes memory here until the engine has read it.
    """
    router = _make_server(context, zmq.ROUTER, secret_key, max_message_bytes)
    router.sndhwm = 0
    router.router_mandatory = True  # sending to an engine that is gone raises an error
    return router


def make_pull(context: zmq.Context, secret_key: bytes, max_message_bytes: int) -> zmq.Socket:
    """The client's end for outputs, to be bound."""
    pull = _make_server(context, zmq.PULL, secret_key, max_message_bytes)
    pull.rcvhwm = OUTPUT_HIGH_WATER_MARK
    return pull


def _make_server(
    context: zmq.Context, kind: int, secret_key: bytes, max_message_bytes: int
) -> zmq.Socket:
    made = _make_socket(context, kind, max_message_bytes)
    made.curve_server = True
    made.curve_secretkey = secret_key
    return made


def bind(server: zmq.Socket, address: str, peer_uid: int) -> None:
    """Binds a client's end. Connections of other users than `peer_uid` are closed at once, so that
    they cannot use up descriptors; where the address has a file, it does not admit them.
    """
    _admit(server, address, peer_uid)
    server.bind(address)
    if (file := _file_of(address)) is not None:
        file.chmod(0o600 if peer_uid == os.geteuid() else 0o666)


def _admit(server: zmq.Socket, address: str, uid: int) -> None:
    """Admits the processes of this user alone. Where ZMQ cannot, as builds for macOS may be, the
    permissions of the address's file do, if it has one.
    """
    try:
        server.setsockopt(zmq.IPC_FILTER_UID, uid)
    except zmq.ZMQError:
        if _file_of(address) is None:
            raise


def _file_of(address: str) -> Path | None:
    file = Path(address.removeprefix("ipc://"))
    return file if file.is_absolute() else None


def remove_files(wire: Wire) -> None:
    """Removes the files of a client's sockets, if they have any: ZMQ leaves them."""
    for address in (wire.input_address, wire.output_address):
        if (file := _file_of(address)) is not None:
            file.unlink(missing_ok=True)


class RejectedPeers:
    """Counts the peers that could not connect to `server`: of another user, or without its key."""

    _EVENTS = (
        zmq.EVENT_ACCEPT_FAILED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )

    def __init__(self, context: zmq.Context, server: zmq.Socket):
        self._num_counted = 0
        self._server = server
        address = f"inproc://rejected-{id(self):x}"
        server.monitor(address, self._EVENTS)
        self._events = context.socket(zmq.PAIR)
        self._events.linger = 0
        self._events.rcvhwm = 0  # at a limit ZMQ would stop all sockets until this one is read
        self._events.connect(address)

    def count(self) -> int:
        """One thread at a time may call it."""
        while not self._events.closed and receive(self._events) is not None:
            self._num_counted += 1
        return self._num_counted

    def close(self) -> None:
        """Call it before the server is closed."""
        self._server.disable_monitor()
        self._events.close()


def connect_dealer(context: zmq.Context, wire: Wire, max_message_bytes: int) -> zmq.Socket:
    """The engine's end for requests. Its input thread always reads."""
    dealer = _make_client(context, zmq.DEALER, wire, max_message_bytes)
    dealer.identity = ENGINE_IDENTITY
    dealer.connect(wire.input_address)
    return dealer


def connect_push(context: zmq.Context, wire: Wire) -> zmq.Socket:
    """The engine's end for outputs."""
    # it receives nothing; a limit would affect the handshake
    push = _make_client(context, zmq.PUSH, wire, -1)
    push.sndhwm = OUTPUT_HIGH_WATER_MARK
    push.connect(wire.output_address)
    return push


def _make_client(context: zmq.Context, kind: int, wire: Wire, max_message_bytes: int) -> zmq.Socket:
    made = _make_socket(context, kind, max_message_bytes)
    made.curve_serverkey = wire.key
    made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    return made


def has_message(source: zmq.Socket) -> bool:
    """Whether `receive` would return a message. Asking costs less than an exception."""
    return bool(int(source.get(zmq.EVENTS)) & POLLIN)


def receive(source: zmq.Socket) -> list[zmq.Frame] | None:
    """The next message's frames, not copied, or None if there is none yet."""
    try:
        frames = [source.recv(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None
    while frames[-1].more:  # recv_multipart asks the socket, which costs more than receiving
        frames.append(source.recv(zmq.NOBLOCK, copy=False))
    return frames


# ---------------------------------------------------------------- between machines

# milliseconds after which a peer that sends nothing counts as gone
PEER_TIMEOUT_MS = 5000
MOST_QUESTION_BYTES = 4 * 2**20  # of one that an engine asks another
MOST_WAITING = 64  # messages of one engine that another has not read


def bind_network(
    context: zmq.Context, kind: int, secret_key: bytes, host: str
) -> tuple[zmq.Socket, str]:
    """A PUSH or PULL of the engine for one rank, and its address: a free port of `host`, which is
    an IP address of this machine. Only a peer that knows the public key can connect.
    """
    made = _for_network(_make_server(context, kind, secret_key, -1), host)
    made.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    return made, made.get_string(zmq.LAST_ENDPOINT)


def connect_network(context: zmq.Context, kind: int, address: str, key: bytes) -> zmq.Socket:
    """A rank's end of `bind_network`."""
    wire = Wire("", key)
    made = _for_network(_make_client(context, kind, wire, -1), address)
    made.immediate = True  # no queue for a peer that is not there
    made.connect(address)
    return made


def _for_network(made: zmq.Socket, address: str) -> zmq.Socket:
    made.ipv6 = address.count(":") > 2
    made.linger = 0
    made.sndhwm = made.rcvhwm = 0  # what waits is bounded by what the engine asks for
    made.heartbeat_ivl = PEER_TIMEOUT_MS // 5
    made.heartbeat_timeout = PEER_TIMEOUT_MS
    return made


def _keys_of(token: bytes) -> tuple[bytes, bytes]:
    """The public and the secret key of all engines that have this token."""
    secret_key = z85.encode(hashlib.sha256(b"quire kv transfer\0" + token).digest())
    return zmq.curve_public(secret_key), secret_key


def bind_to_engines(context: zmq.Context, address: str, token: bytes | None) -> zmq.Socket:
    """A ROUTER for engines with the same token; None: for those of this user, at ipc://PATH.

    Raises zmq.ZMQError.
    """
    if token is None:
        made = _make_socket(context, zmq.ROUTER, MOST_QUESTION_BYTES)
    else:
        made = _make_server(context, zmq.ROUTER, _keys_of(token)[1], MOST_QUESTION_BYTES)
    try:
        if token is None:
            _admit(made, address, os.geteuid())
        _for_network(made, address)
        made.sndhwm = made.rcvhwm = MOST_WAITING  # whatever a peer reads
        before = os.umask(0o177) if token is None else None  # for nobody else at any moment
        try:
            made.bind(address)
        finally:
            if before is not None:
                os.umask(before)
    except zmq.ZMQError:
        made.close()
        raise
    return made


def connect_to_engine(context: zmq.Context, address: str, token: bytes | None) -> zmq.Socket:
    """A DEALER for `bind_to_engines`. It connects again by itself."""
    if token is None:
        made = _make_socket(context, zmq.DEALER, -1)
    else:
        made = _make_client(context, zmq.DEALER, Wire("", _keys_of(token)[0]), -1)
    made.immediate = True  # no queue for a peer that is not there
    _for_network(made, address)
    made.rcvhwm = MOST_WAITING
    made.connect(address)
    return made


def has_peer(push: zmq.Socket) -> bool:
    """Whether a PUSH of `bind_network` or `connect_network`, or a DEALER of `connect_to_engine`, is
    connected.
    """
    return bool(int(push.get(zmq.EVENTS)) & int(zmq.POLLOUT))
