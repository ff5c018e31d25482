"""The engine's input thread: receives requests, signals, attaching programs and process deaths.

Must not know: the engine core, or what a request needs. It passes Events on; the main thread
decides.

    clients' ROUTER ──▶ DEALER ┐                           ┌─▶ aborts  applied before anything else
    Attach ──▶ listener (PULL) ├─▶ poll, decode, guard ────┤
    signals, pidfds, parent ───┘                           └─▶ events  in order of arrival; the main
                                                               thread blocks here
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from .codec import BadFrameError, Decoder, Encoder, in_words, whose
from .machine import descriptor_limit, num_open_descriptors
from .messages import (
    BEAT,
    PROTOCOL,
    AbortRequests,
    Attach,
    ClientMessage,
    Config,
    Detach,
    EngineDead,
    Hello,
    Shutdown,
    UtilityCall,
)
from .process import PARENT_DEATH_SIGNAL, SignalPipe
from .sockets import (
    INPUT_SOCKET,
    LINGER_MS,
    OUTPUT_SOCKET,
    connect_dealer,
    ipc_path,
    listener_pid,
    receive,
    remove_directory,
)

# consecutive messages of one client before signals and other clients are handled
MAX_READS = 256
# of a client: a pidfd, and of each of two sockets the connection and what wakes its thread
DESCRIPTORS_PER_CLIENT = 5
# for what a daemon opens for a short time: refusals, connections of new clients, files, processes
SPARE_DESCRIPTORS = 32


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
    output_address: str


class ClientLeft(NamedTuple):
    client_index: int


class ClientOverflowed(NamedTuple):
    """A daemon's client does not read its outputs.

    Its connection stays until it leaves, so that it can still read the reason.
    """

    client_index: int


class LeaveSignal(NamedTuple):
    """SIGTERM: finish the requests, then exit."""


class Wake(NamedTuple):
    """Ends a wait."""


class Fatal(NamedTuple):
    error: BaseException


Event = (
    FromClient | Refused | ClientJoined | ClientLeft | ClientOverflowed | LeaveSignal | Wake | Fatal
)


@dataclass
class Peer:
    """The input thread's record of a client."""

    dealer: zmq.Socket
    pidfd: int | None  # of a daemon's client; the parent of a child is watched otherwise
    path: Path  # of the client\'s socket


class EngineInput:
    """Owns the DEALER sockets and the listener.

    `events` is for the main thread; `aborts` holds (client, request ids) that overtake it.
    """

    def __init__(self, context: zmq.Context, max_message_bytes: int, signals: SignalPipe):
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.aborts: deque[tuple[int, list[str]]] = deque()
        self.num_bad_frames = 0
        # called with a client and its call "beat", which overtakes the main thread's work
        self.on_beat: Callable[[int, int], None] = lambda client_index, call_id: None
        self._context = context
        self._max_message_bytes = max_message_bytes
        self._decoder = Decoder(ClientMessage, max_message_bytes)
        self._encoder = Encoder(max_message_bytes)
        self._signals = signals
        self._peers: dict[int, Peer] = {}
        self._num_joined = 0
        self._num_own_descriptors = 0  # of a daemon without clients
        self._listener: zmq.Socket | None = None
        self._listener_path: Path | None = None
        self._sockets_path: Path | None = None
        self._parent_pid: int | None = None
        self._num_leave_signals = 0
        self._poller = zmq.Poller()
        # polled object -> handler for when it is readable
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._is_closing = False
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._watch(signals.read_fd, self._on_signals)
        self._thread = threading.Thread(target=self._run, name="quire-input", daemon=True)

    # ------------------------------------------------------------ before the thread starts

    def serve_parent(self, sockets_path: Path, parent_pid: int, parent_fd: int) -> None:
        """Serves one client, number 0, that started this process.

        When the client dies, its socket directory is removed and this process exits.
        """
        self._sockets_path, self._parent_pid = sockets_path, parent_pid
        # nothing writes to it: readable means end-of-file
        self._watch(parent_fd, self._on_parent_gone)
        client_index = self._add_peer(f"ipc://{sockets_path / INPUT_SOCKET}", None)
        self.events.put(ClientJoined(client_index, f"ipc://{sockets_path / OUTPUT_SOCKET}"))

    def serve_listener(self, listener: zmq.Socket, address: str) -> None:
        """Serves any number of clients, numbered as they attach."""
        self._listener, self._listener_path = listener, ipc_path(address)
        self._num_own_descriptors = num_open_descriptors()
        self._watch(listener, self._on_listener)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Calls it in the thread, and waits. An exception is raised here."""
        future: Future[None] = Future()
        self._calls.append((function, future))
        self._signals.wake()
        future.result()

    def close(self) -> None:
        """Ends the thread and closes its sockets."""
        self._is_closing = True
        if self._thread.is_alive():
            self._signals.wake()
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                for ready, _ in self._poller.poll():
                    handler = self._handlers.get(ready)
                    if handler is not None:  # else an earlier handler of this round removed it
                        handler()
        except BaseException as error:
            self.events.put(Fatal(error))
        finally:
            for client_index in list(self._peers):
                self._remove_peer(client_index)
            self._close_listener()

    def _watch(self, source: Any, handler: Callable[[], None]) -> None:
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def _unwatch(self, source: Any) -> None:
        del self._handlers[source]
        self._poller.unregister(source)

    def _add_peer(self, input_address: str, pidfd: int | None) -> int:
        client_index = self._num_joined
        self._num_joined += 1
        dealer = connect_dealer(self._context, input_address, self._max_message_bytes)
        dealer.send_multipart(self._encoder.encode(Hello(PROTOCOL, os.getpid())))
        self._peers[client_index] = Peer(dealer, pidfd, ipc_path(input_address))
        self._watch(dealer, lambda: self._on_dealer(client_index, dealer))
        if pidfd is not None:
            self._watch(pidfd, lambda: self._drop(client_index))
        return client_index

    def _remove_peer(self, client_index: int) -> None:
        peer = self._peers.pop(client_index)
        self._unwatch(peer.dealer)
        peer.dealer.close(linger=0)
        if peer.pidfd is not None:
            self._unwatch(peer.pidfd)
            os.close(peer.pidfd)

    def _drop(self, client_index: int) -> None:
        if client_index in self._peers:
            self._remove_peer(client_index)
            self.events.put(ClientLeft(client_index))

    # ------------------------------------------------------------ frames

    def _on_dealer(self, client_index: int, dealer: zmq.Socket) -> None:
        for _ in range(MAX_READS):
            if client_index not in self._peers or (frames := receive(dealer)) is None:
                return
            try:
                self._on_message(client_index, self._decoder.decode(frames))
            except BadFrameError as error:
                self.num_bad_frames += 1
                if (identity := whose(frames)) is not None:
                    self.events.put(Refused(client_index, identity, in_words(error, frames)))

    def _on_message(self, client_index: int, message: Any) -> None:
        is_parent = self._parent_pid is not None
        if isinstance(message, AbortRequests):
            # it overtakes waiting messages, and is repeated in order below for a request that still
            # waits
            self.aborts.append((client_index, message.request_ids))
        elif isinstance(message, (Attach, Detach) if is_parent else (Attach, Config, Shutdown)):
            raise BadFrameError(f"a {type(message).__name__} is not for this socket")
        elif isinstance(message, Detach):
            return self._drop(client_index)
        elif isinstance(message, UtilityCall) and message.method == BEAT:
            return self.on_beat(client_index, message.call_id)
        self.events.put(FromClient(client_index, message))

    def _on_listener(self) -> None:
        while self._listener is not None and (frames := receive(self._listener)) is not None:
            try:
                self._attach(self._decoder.decode(frames))
            except Exception:
                # not an Attach, invalid addresses, or a program that has died since: this does not
                # affect other clients
                self.num_bad_frames += 1

    def _attach(self, message: Any) -> None:
        # a client of another protocol receives our Hello and refuses it
        if not isinstance(message, Attach):
            raise BadFrameError("a listener takes Attach messages")
        ipc_path(message.input_address)
        ipc_path(message.output_address)
        self._drop_abandoned(lambda path: not path.exists())
        if not self._has_descriptors():
            self._drop_abandoned(lambda path: listener_pid(path) is None)
            if not self._has_descriptors():
                return self._turn_away(message)
        pidfd = os.pidfd_open(message.pid)
        try:
            client_index = self._add_peer(message.input_address, pidfd)
        except BaseException:
            os.close(pidfd)
            raise
        self.events.put(ClientJoined(client_index, message.output_address))

    def _drop_abandoned(self, is_abandoned: Callable[[Path], bool]) -> None:
        """Drops clients whose socket is gone, or nobody's, although their program lives: a client
        that closes before this end has connected cannot send a Detach.
        """
        for client_index, peer in list(self._peers.items()):
            if is_abandoned(peer.path):
                self._drop(client_index)

    def _has_descriptors(self) -> bool:
        """Whether there are descriptors for one more client.

        Sockets of the last ones may not be connected yet, so that they are not open.
        """
        expected = self._num_own_descriptors + DESCRIPTORS_PER_CLIENT * len(self._peers)
        num_used = max(num_open_descriptors(), expected) + SPARE_DESCRIPTORS
        return num_used + DESCRIPTORS_PER_CLIENT <= descriptor_limit()

    def _turn_away(self, message: Attach) -> None:
        """Tells a program why it is not served: it waits for a Hello at its input socket."""
        cause = (
            f"the engine has {len(self._peers)} clients, and no descriptors for another (the limit "
            f"of its process is {descriptor_limit()}; `ulimit -n`, or LimitNOFILE of a systemd "
            f"unit, raises it)"
        )
        dealer = connect_dealer(self._context, message.input_address, self._max_message_bytes)
        dealer.send_multipart(self._encoder.encode(EngineDead(cause)))
        dealer.close(linger=LINGER_MS)

    def _close_listener(self) -> None:
        if self._listener is not None and self._listener_path is not None:
            self._unwatch(self._listener)
            self._listener_path.unlink(missing_ok=True)
            self._listener.close(linger=0)
            self._listener = None

    # ------------------------------------------------------------ signals and deaths

    def _on_signals(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                function()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        for number in self._signals.read():
            if number == signal.SIGINT:
                self._leave_at_once(128 + number)
            elif (
                number == PARENT_DEATH_SIGNAL
                and self._parent_pid is not None
                and os.getppid() != self._parent_pid
            ):
                self._on_parent_gone()
            elif number == signal.SIGTERM:
                self._num_leave_signals += 1
                if self._num_leave_signals > 1:
                    self._leave_at_once(128 + number)
                self._close_listener()  # new programs then find no listener
                self.events.put(LeaveSignal())

    def _on_parent_gone(self) -> None:
        if self._sockets_path is not None:
            remove_directory(self._sockets_path)
        self._leave_at_once(1)

    def _leave_at_once(self, exit_code: int) -> None:
        """Exits without waiting for the main thread, which may be in the model for seconds.

        The kernel releases the rest.
        """
        if self._listener is not None and self._listener_path is not None:
            self._listener_path.unlink(missing_ok=True)
        os._exit(exit_code)
