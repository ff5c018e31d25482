"""The engine's output thread: encodes outputs and sends them to their clients.

Must not know: the engine core, or the state of a client's requests.

A connection holds OUTPUT_HIGH_WATER_MARK messages on each side. Messages that do not fit wait here,
in order, encoded, and are counted in bytes. Nothing is dropped from the middle. Above
`max_backlog_bytes`:

- An engine with one client stops stepping (the main thread checks `is_full`) until the client has
  read half of it. Requests, aborts and utility calls are still accepted, and a waiting client reads
  its outputs meanwhile, so this cannot deadlock.
- A daemon does not let one client block the others: it drops the reader and ends its requests. The
  client finds EngineDead after its last outputs.

In the other direction only what users submit is limited: a request is in one process or the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import zmq

from .codec import Codec
from .failures import pack_exception
from .messages import (
    EngineCoreOutputs,
    EngineDead,
    EngineMessage,
    Finished,
    FinishReason,
    UtilityResult,
)
from .process import WakePipe
from .sockets import Wire, connect_push

MAX_BACKLOG_BYTES = 64 * 2**20


class Connect(NamedTuple):
    client_index: int
    wire: Wire


class Disconnect(NamedTuple):
    client_index: int


class Send(NamedTuple):
    client_index: int
    message: EngineMessage


class Close(NamedTuple):
    timeout_s: float


@dataclass
class OutputClient:
    """The output thread's record of a client."""

    push: zmq.Socket
    backlog: deque[list] = field(default_factory=deque)  # encoded messages
    backlog_bytes: int = 0
    is_dropped: bool = False
    num_outputs: int = 0  # encoded so far

    def keep(self, frames: list) -> None:
        self.backlog.append(frames)
        self.backlog_bytes += _num_bytes(frames)


class EngineOutput:
    """Owns the PUSH sockets.

    All methods are thread-safe; the output thread carries them out in order.
    """

    def __init__(
        self,
        context: zmq.Context,
        codec: Codec,
        *,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        on_drained: Callable[[], None] = lambda: None,
        on_overflow: Callable[[int], None] | None = None,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
        on_lost: Callable[[int, list[str]], None] = lambda client_index, request_ids: None,
    ):
        """These are called in the output thread. on_drained: is_full has ended. on_overflow: for
        daemons; a client was dropped, because it did not read or could not be connected. on_fatal:
        the thread has failed. on_lost: the rows of a client that could not be encoded.
        """
        self.max_backlog_bytes = max_backlog_bytes
        self.num_lost_outputs = 0  # rows that could not be encoded; their requests were ended
        # a client's backlog is above the limit, or has not yet dropped to half of it
        self.is_full = False
        self._on_drained = on_drained
        self._on_overflow = on_overflow
        self._on_fatal = on_fatal
        self._on_lost = on_lost
        self._context = context
        self._codec = codec
        self._readers: dict[int, OutputClient] = {}
        self._orders: deque[Connect | Disconnect | Send | Close] = deque()
        self._wake = WakePipe()
        self._is_closed = False
        self._poller = zmq.Poller()
        self._poller.register(self._wake.read_fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="quire-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def connect(self, client_index: int, wire: Wire) -> None:
        self._order(Connect(client_index, wire))

    def disconnect(self, client_index: int) -> None:
        """The client has left: discards its waiting messages."""
        self._order(Disconnect(client_index))

    def send(self, client_index: int, message: EngineMessage) -> None:
        """Sends without blocking. A message to a client that has left is dropped."""
        self._order(Send(client_index, message))

    def close(self, timeout_s: float) -> None:
        """Ends the thread when everything is sent, or after `timeout_s`; unread messages are then
        discarded.
        """
        if self._thread.is_alive():
            self._order(Close(timeout_s))
            self._thread.join()
        if not self._is_closed:
            self._wake.close()
            self._is_closed = True

    def _order(self, order: Connect | Disconnect | Send | Close) -> None:
        self._orders.append(order)
        self._wake.wake()

    # ------------------------------------------------------------ in the output thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._on_fatal(error)
        finally:
            for reader in self._readers.values():
                reader.push.close()

    def _serve(self) -> None:
        """Runs until Close is handled."""
        close_at = None
        while True:
            timeout_ms = (
                None if close_at is None else max(0, int((close_at - time.monotonic()) * 1000))
            )
            for ready, _ in self._poller.poll(timeout_ms):
                if ready == self._wake.read_fd:
                    self._wake.read()
                else:
                    self._flush(
                        next(reader for reader in self._readers.values() if reader.push is ready)
                    )
            while self._orders:
                order = self._orders.popleft()
                if isinstance(order, Close):
                    close_at = time.monotonic() + order.timeout_s
                else:
                    self._carry_out(order)
            if close_at is not None and (
                time.monotonic() >= close_at or not any(r.backlog for r in self._readers.values())
            ):
                return

    def _carry_out(self, order: Connect | Disconnect | Send) -> None:
        if isinstance(order, Connect):
            self._connect(order)
        elif isinstance(order, Disconnect):
            self._disconnect(order.client_index)
        elif (
            reader := self._readers.get(order.client_index)
        ) is not None and not reader.is_dropped:
            if isinstance(order.message, EngineCoreOutputs):
                msgspec.structs.force_setattr(order.message, "number", reader.num_outputs)
                reader.num_outputs += 1
            self._send(reader, order.client_index, self._encode(order))

    def _connect(self, order: Connect) -> None:
        try:
            push = connect_push(self._context, order.wire)
        except zmq.ZMQError:  # no descriptors are left
            if self._on_overflow is None:
                raise
            self._on_overflow(order.client_index)
        else:
            self._readers[order.client_index] = OutputClient(push)

    def _encode(self, order: Send) -> list:
        try:
            return self._codec.encode(order.message)
        # the client that waits for this message receives the reason instead
        except Exception as error:
            message = order.message
            if isinstance(message, UtilityResult):
                return self._codec.encode(
                    UtilityResult(message.call_id, failure=pack_exception(error))
                )
            if isinstance(message, EngineCoreOutputs):
                self.num_lost_outputs += len(message.request_ids)
                self._on_lost(order.client_index, message.request_ids)
                return self._codec.encode(
                    error_rows(message, f"the output could not be sent: {error}")
                )
            raise

    def _send(self, reader: OutputClient, client_index: int, frames: list) -> None:
        if not reader.backlog:
            try:
                reader.push.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) == 1)
                return
            except zmq.Again:
                self._poller.register(reader.push, zmq.POLLOUT)
        reader.keep(frames)
        if reader.backlog_bytes > self.max_backlog_bytes:
            if self._on_overflow is None:
                self.is_full = True
            else:
                cause = (
                    f"this client did not read its outputs (over {self.max_backlog_bytes} bytes "
                    f"waited); its requests were ended"
                )
                reader.keep(self._codec.encode(EngineDead(cause)))
                reader.is_dropped = True
                self._on_overflow(client_index)

    def _flush(self, reader: OutputClient) -> None:
        """Sends as much of a backlog as the connection accepts."""
        while reader.backlog:
            try:
                reader.push.send_multipart(
                    reader.backlog[0], zmq.NOBLOCK, copy=len(reader.backlog[0]) == 1
                )
            except zmq.Again:
                break
            reader.backlog_bytes -= _num_bytes(reader.backlog.popleft())
        else:
            self._poller.unregister(reader.push)
        self._tell_if_drained()

    def _disconnect(self, client_index: int) -> None:
        reader = self._readers.pop(client_index, None)
        if reader is not None:
            if reader.push in self._poller:
                self._poller.unregister(reader.push)
            reader.push.close(linger=0)
            self._tell_if_drained()

    def _tell_if_drained(self) -> None:
        if self.is_full and all(
            2 * reader.backlog_bytes <= self.max_backlog_bytes for reader in self._readers.values()
        ):
            self.is_full = False
            self._on_drained()


def error_rows(outputs: EngineCoreOutputs, error: str) -> EngineCoreOutputs:
    """The same rows without tokens, each finished with this error."""
    num_rows = len(outputs.request_ids)
    finished = [Finished(row, FinishReason.ERROR, error=error) for row in range(num_rows)]
    return msgspec.structs.replace(
        outputs,
        num_tokens=[0] * num_rows,
        token_ids=[],
        finished=finished,
        logprobs=[],
        num_cached_tokens=[],
        token_steps=[],
    )


def _num_bytes(frames: list) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)
