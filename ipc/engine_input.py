"""The engine's input thread: receives requests, signals, attaching programs and process deaths.

Must not know: the engine core, or what a request needs. It passes Events on; the main thread
decides.

    clients' ROUTER ──▶ DEALER ┐                           ┌─▶ aborts  applied before anything else
    Attach ──▶ listener        ├─▶ poll, decode, guard ────┤
    signals, pidfds ───────────┘                           └─▶ events  in order of arrival; the main
                                                               thread blocks here
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import zmq

from .codec import BadFrameError, Codec, MessageEncoder, readable_error, sender_id
from .errors import EngineDeadError
from .listener import (
    ATTACH_TIMEOUT_S,
    BadAttachError,
    Refusal,
    credentials_of,
    read_attach,
    send_answer,
)
from .machine import descriptor_limit, num_open_descriptors
from .messages import (
    BEAT,
    PROTOCOL,
    AbortRequests,
    Config,
    Hello,
    Served,
    Shutdown,
    StartWave,
    TurnedAway,
    UtilityCall,
    UtilityResult,
)
from .operating_system import SYSTEM
from .process import LEAVE_SIGNAL, SignalPipe
from .socket_files import SocketFile
from .sockets import Wire, connect_dealer, has_message, ipc_path, receive

# consecutive messages of one client before signals and other clients are handled
MAX_READS = 256
# a pidfd, the client's connection, and two for each of its two sockets: the connection, and what
# wakes its thread
DESCRIPTORS_PER_CLIENT = 6
ENDED = "the input thread has ended"
RELEASED = "the engine needed the descriptors of a client that was idle"
# for what a daemon opens for a short time: pending connections, files, processes
SPARE_DESCRIPTORS = 32
# connections whose program has not sent its Attach; another one replaces the first
MAX_PENDING = 16


class FromClient(NamedTuple):
    client_index: int
    message: Any  # EngineCoreRequest | AbortRequests | UtilityCall | Config | Shutdown


class Refused(NamedTuple):
    """A frame that is not a message, but names its request (str) or utility call (int)."""

    client_index: int
    identity: str | int
    error: str


class ClientJoined(NamedTuple):
    client_index: int
    wire: Wire


class ClientLeft(NamedTuple):
    client_index: int


class ClientOverflowed(NamedTuple):
    """A daemon's client does not read its outputs.

    Its connection stays until it leaves, so that it can still read the reason.
    """

    client_index: int


class ClientBeyondLimit(NamedTuple):
    """A program wants to be served, and there are no descriptors for another. `admit` answers."""

    connection: socket.socket
    wire: Wire


class LeaveSignal(NamedTuple):
    """SIGTERM: finish the requests, then exit."""


class Wake(NamedTuple):
    """Ends a wait."""


class Fatal(NamedTuple):
    error: BaseException
    what: str = "an IO thread failed"


Event = (
    FromClient
    | Refused
    | ClientJoined
    | ClientLeft
    | ClientOverflowed
    | ClientBeyondLimit
    | LeaveSignal
    | Wake
    | Fatal
)


@dataclass
class InputClient:
    """The input thread's record of a client. The parent of a child has a dealer only."""

    dealer: zmq.Socket
    connection: socket.socket | None = None  # ends when the client leaves or dies
    # A fork of the client keeps its end of the connection open.
    pidfd: int | None = None
    heard_at: float = field(default_factory=time.monotonic)


class EngineInput:
    """Owns the DEALER sockets, the listener and its connections.

    `events` is for the main thread; `aborts` holds (client, request ids) that overtake it.
    """

    def __init__(
        self,
        context: zmq.Context,
        codec: Codec,
        signals: SignalPipe,
        events: queue.SimpleQueue[Event],
        send: Callable[[int, UtilityResult], None],
    ):
        """codec: decodes ClientMessages. send: to the client with this index. The call "beat" is
        answered in this thread, so that it overtakes the main thread's work.
        """
        self.events = events
        self.aborts: deque[tuple[int, list[str]]] = deque()
        self.num_bad_frames = 0
        self._send = send
        self._context = context
        self.codec = codec
        self._encoder = MessageEncoder(codec.max_message_bytes)  # of this thread; for Hello alone
        self._signals = signals
        self._clients: dict[int, InputClient] = {}
        self._num_joined = 0
        self._num_own_descriptors = 0  # of a daemon without clients
        self._listener: socket.socket | None = None
        self._listener_file: SocketFile | None = None
        self._token: bytes | None = None
        self._pending: dict[socket.socket, float] = {}  # until when each may send its Attach
        self._served: list[socket.socket] = []  # of clients that the closed thread served
        self._has_parent = False
        self._num_leave_signals = 0
        self._poller = zmq.Poller()
        # polled object -> handler for when it is readable
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._is_closing = False
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._watch(signals.read_fd, self._on_signals)
        self._thread = threading.Thread(target=self._run, name="quire-input", daemon=True)

    # ------------------------------------------------------------ before the thread starts

    def serve_parent(self, wire: Wire) -> None:
        """Serves one client, number 0, that started this process and that it dies with."""
        self._has_parent = True
        self.events.put(ClientJoined(self._add_client(wire), wire))

    def serve_listener(
        self, listener: socket.socket, address: str | None, token: bytes | None
    ) -> None:
        """Serves any number of clients, numbered as they attach.

        listener, token: see ipc/listener.py. address: None if the listener's file belongs to
        another process.
        """
        self._listener, self._token = listener, token
        self._listener_file = None if address is None else SocketFile(ipc_path(address))
        self._num_own_descriptors = num_open_descriptors()
        self._watch(listener.fileno(), self._on_listener)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Calls it in the thread, and waits. An exception is raised here."""
        future: Future[None] = Future()
        self._calls.append((function, future))
        self._signals.wake()
        if not self._thread.is_alive():
            raise EngineDeadError(ENDED)
        future.result()

    def close(self) -> None:
        """Ends the thread and closes its sockets."""
        self._is_closing = True
        if self._thread.is_alive():
            self._signals.wake()
            self._thread.join()

    def close_connections(self) -> None:
        """Shows the clients that this engine has ended, after `close` and their last outputs."""
        for connection in self._served:
            connection.close()
        self._served.clear()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                polled = self._poller.poll(self._poll_timeout_ms())
                found = [(ready, self._handlers[ready]) for ready, _ in polled]
                for ready, handler in found:
                    # else an earlier handler of this round removed it, and may have opened another
                    # file with its number
                    if self._handlers.get(ready) is handler:
                        handler()
                self._drop_late_connections()
        except BaseException as error:
            self.events.put(Fatal(error))
        finally:
            for client_index in list(self._clients):
                self._remove_client(client_index, closes=False)
            self._close_listener()
            while self._calls:
                self._calls.popleft()[1].set_exception(EngineDeadError(ENDED))

    def _watch(self, source: Any, handler: Callable[[], None]) -> None:
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def _unwatch(self, source: Any) -> None:
        del self._handlers[source]
        self._poller.unregister(source)

    def _add_client(
        self, wire: Wire, connection: socket.socket | None = None, pidfd: int | None = None
    ) -> int:
        client_index = self._num_joined
        self._num_joined += 1
        dealer = connect_dealer(self._context, wire, self.codec.max_message_bytes)
        dealer.send_multipart(self._encoder.encode(Hello(PROTOCOL, os.getpid())))
        self._clients[client_index] = InputClient(dealer, connection, pidfd)
        self._watch(dealer, lambda: self._on_dealer(client_index, dealer))
        for fd in (pidfd, None if connection is None else connection.fileno()):
            if fd is not None:
                self._watch(fd, lambda: self._drop(client_index))
        return client_index

    def _remove_client(self, client_index: int, *, closes: bool = True) -> None:
        client = self._clients.pop(client_index)
        self._unwatch(client.dealer)
        client.dealer.close(linger=0)
        if client.pidfd is not None:
            self._unwatch(client.pidfd)
            os.close(client.pidfd)
        if client.connection is not None:
            self._unwatch(client.connection.fileno())
            if closes:
                client.connection.close()
            else:
                self._served.append(client.connection)

    def _drop(self, client_index: int) -> None:
        if client_index in self._clients:
            self._remove_client(client_index)
            self.events.put(ClientLeft(client_index))

    # ------------------------------------------------------------ frames

    def _on_dealer(self, client_index: int, dealer: zmq.Socket) -> None:
        for _ in range(MAX_READS):
            if (
                client_index not in self._clients
                or not has_message(dealer)
                or (frames := receive(dealer)) is None
            ):
                return
            self._clients[client_index].heard_at = time.monotonic()
            try:
                self._on_message(client_index, self.codec.decode(frames))
            except BadFrameError as error:
                self.num_bad_frames += 1
                if (identity := sender_id(frames)) is not None:
                    self.events.put(Refused(client_index, identity, readable_error(error, frames)))

    def _on_message(self, client_index: int, message: Any) -> None:
        if isinstance(message, AbortRequests):
            # it overtakes waiting messages, and is repeated in order below for a request that still
            # waits
            self.aborts.append((client_index, message.request_ids))
        elif isinstance(message, (Config, Shutdown, StartWave)) and not self._has_parent:
            raise BadFrameError(f"a daemon's client sends no {type(message).__name__}")
        elif isinstance(message, UtilityCall) and message.method == BEAT:
            return self._send(client_index, UtilityResult(message.call_id, BEAT))
        self.events.put(FromClient(client_index, message))

    # ------------------------------------------------------------ the listener

    def _on_listener(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no program waits, or it has left again
                return
            if len(self._pending) == MAX_PENDING:
                self._drop_pending(next(iter(self._pending)))
            connection.setblocking(False)
            self._pending[connection] = time.monotonic() + ATTACH_TIMEOUT_S
            self._watch(connection.fileno(), partial(self._on_pending, connection))

    def _on_pending(self, connection: socket.socket) -> None:
        """Serves the program or answers why not. Nothing that it sends affects other clients."""
        is_served = False
        self._unwatch(connection.fileno())
        del self._pending[connection]
        try:
            is_served = self._attach(connection)
        except Refusal as refusal:
            send_answer(connection, TurnedAway(str(refusal)))
        except (BadAttachError, OSError, zmq.ZMQError):
            self.num_bad_frames += 1
        finally:
            if not is_served:
                connection.close()

    def _attach(self, connection: socket.socket) -> bool:
        attach = read_attach(connection, self._token)
        if attach is None:
            return False
        wire = Wire(attach.wire_name, attach.key)
        if self._has_descriptors():
            self._serve(connection, wire)
        else:
            self.events.put(ClientBeyondLimit(connection, wire))
        return True

    def idle_clients(self, idle_s: float) -> list[int]:
        """Indices of a daemon's clients that have sent nothing for `idle_s` seconds, the longest
        idle first. Run it with `call`, as `admit`.
        """
        until = time.monotonic() - idle_s
        idle = [(client.heard_at, index) for index, client in self._clients.items()]
        return [index for heard_at, index in sorted(idle) if heard_at < until]

    def admit(self, beyond_limit: ClientBeyondLimit, idle: int | None, idle_s: float) -> None:
        """Releases the client `idle`, if it still is, and serves the connection in its place."""
        connection, num_spare = beyond_limit.connection, SPARE_DESCRIPTORS
        try:
            if idle in self.idle_clients(idle_s):
                client = self._clients[idle]
                if not has_message(client.dealer) and client.connection is not None:
                    send_answer(client.connection, TurnedAway(RELEASED))
                    self._drop(idle)
                    num_spare //= 2  # its sockets are not closed yet
            if not self._has_descriptors(num_spare):
                raise Refusal(
                    f"the engine has {len(self._clients)} clients, and no descriptors for another "
                    f"(the limit of its process is {descriptor_limit()}; `ulimit -n`, or "
                    f"LimitNOFILE of a systemd unit, raises it), and none has been idle for "
                    f"{idle_s:g} s"
                )
            self._serve(connection, beyond_limit.wire)
        except Refusal as refusal:
            send_answer(connection, TurnedAway(str(refusal)))
            connection.close()
        except (OSError, zmq.ZMQError):
            connection.close()

    def _serve(self, connection: socket.socket, wire: Wire) -> None:
        pid = credentials_of(connection).pid
        pidfd = SYSTEM.watch(pid) if pid else None  # 0: of another container
        try:
            send_answer(connection, Served(os.getpid()))
            client_index = self._add_client(wire, connection, pidfd)
        except BaseException:
            if pidfd is not None:
                os.close(pidfd)
            raise
        self.events.put(ClientJoined(client_index, wire))

    def _drop_pending(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._unwatch(connection.fileno())
        connection.close()

    def _poll_timeout_ms(self) -> int | None:
        if not self._pending:
            return None
        return max(0, int(1000 * (min(self._pending.values()) - time.monotonic())) + 1)

    def _drop_late_connections(self) -> None:
        now = time.monotonic()
        for connection in [one for one, until in self._pending.items() if until < now]:
            self._drop_pending(connection)

    def _has_descriptors(self, num_spare: int = SPARE_DESCRIPTORS) -> bool:
        """Whether there are descriptors for one more client beside `num_spare`.

        Sockets of the last ones may not be connected yet, so that they are not open.
        """
        expected = self._num_own_descriptors + DESCRIPTORS_PER_CLIENT * len(self._clients)
        num_used = max(num_open_descriptors(), expected) + num_spare
        return num_used + DESCRIPTORS_PER_CLIENT <= descriptor_limit()

    def _close_listener(self) -> None:
        for connection in list(self._pending):
            self._drop_pending(connection)
        if self._listener is None:
            return
        self._unwatch(self._listener.fileno())
        if self._listener_file is not None:
            self._listener_file.remove()
        self._listener.close()
        self._listener = None

    # ------------------------------------------------------------ signals

    def _on_signals(self) -> None:
        numbers = self._signals.read()  # before the calls, so that the byte of a later one stays
        while self._calls:
            function, future = self._calls.popleft()
            try:
                function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        for number in numbers:
            if number == signal.SIGINT:
                self._leave_at_once(128 + number)
            elif number in (signal.SIGTERM, LEAVE_SIGNAL):
                self._num_leave_signals += 1
                if self._num_leave_signals > 1:
                    self._leave_at_once(128 + number)
                self._close_listener()  # new programs then find no listener
                self.events.put(LeaveSignal())

    def _leave_at_once(self, exit_code: int) -> None:
        """Exits without waiting for the main thread, which may be in the model for seconds.

        The kernel releases the rest.
        """
        if self._listener is not None and self._listener_file is not None:
            self._listener_file.remove()
        os._exit(exit_code)
