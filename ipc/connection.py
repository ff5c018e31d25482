"""A client's end of the wire: two bound sockets, and the engine behind them.

Must not know: requests and outputs, or who waits for them (frontend/clients/mp_client.py).
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from .codec import BadFrameError, make_codec
from .errors import EngineStartError
from .listener import (
    TOKEN_VARIABLE,
    attach,
    connect_to_daemon,
    credentials_of,
    read_token,
    release_reason,
)
from .machine import descriptor_limit, num_free_descriptors, num_open_descriptors
from .messages import ClientMessage, EngineMessage, Shutdown
from .process import EarlyEngineProcess, EngineProcess
from .sockets import (
    ENGINE_IDENTITY,
    RejectedPeers,
    bind,
    make_context,
    make_pull,
    make_router,
    make_wire,
    remove_files,
)

if TYPE_CHECKING:
    import asyncio

# Descriptors that an engine takes in this process: its sockets, what ZMQ opens for them, and the
# child's pipes. ZMQ ends the process when it cannot open one.
NUM_DESCRIPTORS = 24


class Connection:
    """Owns the sockets and the engine's process, or the connection to a daemon's listener.

    Does not refer to the client, which can therefore be garbage-collected. Raises EngineStartError
    if this process may not open enough descriptors.
    """

    def __init__(self, max_message_bytes: int):
        if num_free_descriptors() < NUM_DESCRIPTORS:
            raise EngineStartError(
                f"too many open files: {num_open_descriptors()} of {descriptor_limit()} "
                f"(ulimit -n), and an engine takes {NUM_DESCRIPTORS}"
            )
        self.owner_pid = os.getpid()
        self.wire, secret_key = make_wire()
        self.context = make_context()
        self.router = make_router(self.context, secret_key, max_message_bytes)
        self.pull = make_pull(self.context, secret_key, max_message_bytes)
        self._rejected = [RejectedPeers(self.context, end) for end in (self.router, self.pull)]
        self._rejected_lock = threading.Lock()
        self.codec = make_codec(EngineMessage, max_message_bytes)
        self.num_bad_frames = 0  # from the engine, dropped
        self.process: EngineProcess | EarlyEngineProcess | None = None  # a child
        self._daemon: socket.socket | None = None  # open while it lives and serves
        # readable when the engine is gone: of a child a pidfd, of a daemon the connection
        self.pidfd = -1
        self.engine_pid = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_closed = False

    def spawn(
        self,
        command: Sequence[str],
        max_message_bytes: int,
        early: EarlyEngineProcess | None = None,
    ) -> None:
        """Starts the engine. early: it runs already, and this connection owns it from now on."""
        self.process, wire = early, self.wire
        self._bind(os.geteuid())
        if early is not None:
            started: EngineProcess | EarlyEngineProcess = early
            early.connect(wire.name, wire.key, max_message_bytes)
        else:
            started = EngineProcess(command, wire.name, wire.key, max_message_bytes)
        self.process, self.pidfd, self.engine_pid = started, started.pidfd, started.pid

    def attach(self, address: str, token_file: str | None = None) -> None:
        """Asks the daemon at `address` to connect to these sockets.

        Raises EngineStartError if nothing listens there, or the daemon does not serve this program.
        """
        token_file = token_file or os.environ.get(TOKEN_VARIABLE)
        token = read_token(token_file) if token_file else b""
        self._daemon = daemon = connect_to_daemon(address)
        uid = credentials_of(daemon).uid
        if uid not in (os.geteuid(), 0) and not token:
            raise EngineStartError(
                f"the engine at {address} belongs to another user ({uid}); to use it, name its "
                f"token with token_file or {TOKEN_VARIABLE}"
            )
        self._bind(uid)
        self.engine_pid = attach(daemon, self.wire, token).pid
        self.pidfd = daemon.fileno()

    def _bind(self, peer_uid: int) -> None:
        bind(self.router, self.wire.input_address, peer_uid)
        bind(self.pull, self.wire.output_address, peer_uid)

    @property
    def num_rejected_peers(self) -> int:
        """Connections to these sockets that were refused: no engine's. Thread-safe."""
        with self._rejected_lock:
            return sum(rejected.count() for rejected in self._rejected)

    def send(self, message: ClientMessage) -> None:
        """Sends without blocking. Raises zmq.ZMQError if the engine is gone."""
        self.router.send_multipart([ENGINE_IDENTITY, *self.codec.encode(message)], zmq.NOBLOCK)

    def decode(self, frames: list) -> Any:
        """The engine's message in these frames, or None for a bad frame, which is counted."""
        try:
            return self.codec.decode(frames)
        except BadFrameError:
            self.count_bad_frame()
            return None

    def count_bad_frame(self) -> None:
        """Counts a message that is dropped."""
        self.num_bad_frames += 1

    def describe_death(self) -> str:
        """How a dead engine died, as far as this process can tell."""
        if self.process is not None:
            return self.process.describe_death()
        return f"the engine (pid {self.engine_pid}) is gone"

    def release_reason(self) -> str | None:
        """Why a daemon has released this client, which was idle; None: the engine has ended."""
        return None if self._daemon is None else release_reason(self._daemon)

    def reap(self) -> signal.Signals | None:
        """The signal that ended a child which is dead; None: it exited, or is a daemon."""
        if self.process is not None:
            self.process.reap()
        return self.exit_signal

    @property
    def exit_signal(self) -> signal.Signals | None:
        """The signal that ended a child which is dead and reaped."""
        return None if self.process is None else self.process.exit_signal

    def watch(
        self,
        loop: asyncio.AbstractEventLoop,
        on_readable: Callable[[], None],
        on_death: Callable[[], None],
    ) -> None:
        self.stop_watching()
        self.loop = loop
        loop.add_reader(self.pull.FD, on_readable)
        loop.add_reader(self.pidfd, on_death)

    def stop_watching(self) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.remove_reader(self.pull.FD)
            self.loop.remove_reader(self.pidfd)
        self.loop = None

    def close(self, timeout_s: float = 0.0) -> None:
        """Shuts a child down, which has `timeout_s` to exit by itself, or detaches from a daemon.

        Called by shutdown, by the garbage collector or at exit; may be called twice.
        """
        # a fork of the owner must not close it
        if self.is_closed or os.getpid() != self.owner_pid:
            return
        self.is_closed = True
        self.stop_watching()
        if self.process is not None:
            try:
                self.send(Shutdown())
            except (zmq.ZMQError, OSError):
                pass  # the engine never started, or is gone
            self.process.close(timeout_s)
        if self._daemon is not None:
            try:
                self._daemon.shutdown(socket.SHUT_RDWR)  # a fork of this process may have it open
            except OSError:
                pass  # the daemon is gone
            self._daemon.close()
        with self._rejected_lock:
            for rejected in self._rejected:
                rejected.close()
        self.router.close()
        self.pull.close(linger=0)
        self.context.term()
        remove_files(self.wire)
