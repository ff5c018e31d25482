"""A client's end of the wire: two bound sockets in a private directory, and the engine behind them.

Must not know: requests and outputs, or who waits for them (frontend/clients/mp_client.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import zmq

from .codec import BadFrameError, Decoder, Encoder
from .errors import EngineStartError
from .messages import PROTOCOL, Attach, ClientMessage, Detach, EngineMessage, Shutdown
from .process import EngineProcess
from .sockets import (
    ENGINE_IDENTITY,
    INPUT_SOCKET,
    OUTPUT_SOCKET,
    SocketDirectory,
    bind_pull,
    bind_router,
    connect_push,
    ipc_path,
    listener_pid,
    make_context,
)

if TYPE_CHECKING:  # 6 MB and 30 ms, which blocking programs do not need
    import asyncio

LISTEN_GRACE_S = 0.5  # how long a socket file may exist before it has a listener


class Connection:
    """Owns the sockets, their directory and the engine's process.

    Does not refer to the client, which can therefore be garbage-collected.
    """

    def __init__(self, max_message_bytes: int):
        self.owner_pid = os.getpid()
        self.directory = SocketDirectory()
        self.context = make_context()
        self.router = bind_router(
            self.context, self.directory.address(INPUT_SOCKET), max_message_bytes
        )
        self.pull = bind_pull(
            self.context, self.directory.address(OUTPUT_SOCKET), max_message_bytes
        )
        # readable after wake(); ends a poll that waits for the engine
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.encoder = Encoder(max_message_bytes)
        self.decoder = Decoder(EngineMessage, max_message_bytes)
        self.num_bad_frames = 0  # from the engine, dropped
        self.process: EngineProcess | None = None  # a child
        self.pidfd = -1  # of the engine, child or daemon
        self.engine_pid = 0
        self.shutdown_timeout_s = 10.0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_closed = False

    def spawn(self, command: Sequence[str], max_message_bytes: int) -> None:
        self.process = EngineProcess(command, self.directory.path, max_message_bytes)
        self.pidfd, self.engine_pid = self.process.pidfd, self.process.pid

    def attach(self, address: str) -> None:
        """Asks the daemon at `address` to connect to these sockets.

        Raises EngineStartError if nothing listens there.
        """
        path = ipc_path(address)
        # A daemon's file exists shortly before the daemon listens, and scripts wait for the file.
        deadline = time.monotonic() + LISTEN_GRACE_S
        while (pid := listener_pid(path)) is None and path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if pid is None:
            raise EngineStartError(
                f"no engine listens at {address}; start one with: quire engine --listen {address}"
            )
        if pid == 0:
            raise EngineStartError(
                f"the engine at {address} runs where its process cannot be seen (another "
                f"container?)"
            )
        self.pidfd, self.engine_pid = os.pidfd_open(pid), pid
        message = Attach(
            PROTOCOL,
            os.getpid(),
            self.directory.address(INPUT_SOCKET),
            self.directory.address(OUTPUT_SOCKET),
        )
        push = connect_push(self.context, f"ipc://{path}")
        push.send_multipart(self.encoder.encode(message))
        push.close()

    def send(self, message: ClientMessage) -> None:
        """Sends without blocking. Raises zmq.ZMQError if the engine is gone."""
        self.router.send_multipart([ENGINE_IDENTITY, *self.encoder.encode(message)], zmq.NOBLOCK)

    def wake(self) -> None:
        """Makes wake_fd readable from now on. Thread-safe."""
        if not self.is_closed:
            os.eventfd_write(self.wake_fd, 1)

    def decode(self, frames: list) -> Any:
        """The engine's message in these frames, or None for a bad frame, which is counted."""
        try:
            return self.decoder.decode(frames)
        except BadFrameError:
            self.num_bad_frames += 1
            return None

    def describe_death(self) -> str:
        """How a dead engine died, as far as this process can tell."""
        if self.process is not None:
            return self.process.describe_death()
        return f"the engine (pid {self.engine_pid}) is gone"

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

    def close(self) -> None:
        """Shuts a child down, or detaches from a daemon.

        Called by shutdown, by the garbage collector or at exit; may be called twice.
        """
        # a fork of the owner must not close it
        if self.is_closed or os.getpid() != self.owner_pid:
            return
        self.is_closed = True
        self.stop_watching()
        try:
            self.send(Shutdown() if self.process is not None else Detach())
        except (zmq.ZMQError, OSError):
            pass  # the engine never started, or is gone
        if self.process is not None:
            self.process.close(self.shutdown_timeout_s)
        elif self.pidfd >= 0:
            os.close(self.pidfd)
        os.close(self.wake_fd)
        self.router.close()
        self.pull.close(linger=0)
        self.context.term()
        self.directory.remove()
