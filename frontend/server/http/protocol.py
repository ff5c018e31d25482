"""One connection: uvicorn's HTTP protocol with additional limits: deadlines, sizes, counts and slow
readers.

Must not know: routes, the engine, the content of a response.

    connected ──▶ idle ──first byte──▶ head ──▶ body ──▶ answer ──▶ idle …
                  header_timeout_s     header_timeout_s  app.py     write_timeout_s while unread
                  (keep_alive_timeout_s after an answer)

An error response is sent after the responses in progress; then the connection ends. Input is read
and discarded for LINGER_S first, since closing a socket with unread input makes the system send
RST, which discards the error response at the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from types import CoroutineType
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..config import ServerConfig
from .call import new_request_id
from .errors import ApiError
from .write_batch import GatheringTransport, WriteBatch

logger = logging.getLogger(__name__)
MAX_PIPELINED = 16  # requests that one connection may pipeline
LINGER_S = 2.0
# These header fields say where a body ends.
FRAMING = (b"content-length", b"transfer-encoding")
TLS_HANDSHAKE = b"\x16"  # the first byte of a TLS connection


class Protocol(HttpToolsProtocol):
    """One connection. `on_refused` is called with the code of each rejected request. Connections
    that share a `batch` write together.
    """

    def __init__(
        self,
        *args: Any,
        limits: ServerConfig,
        on_refused: Callable[[str], None],
        batch: WriteBatch,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._batch = batch
        self._limits = limits
        self._on_refused = on_refused
        # The response to this request is in progress. uvicorn's `cycle` is the newest
        # request, which may be queued behind it.
        self._active: RequestResponseCycle | None = None
        self._deadline: asyncio.TimerHandle | None = None  # for the client's next input
        self._unread_timer: asyncio.TimerHandle | None = None
        self._num_unread_bytes = 0  # when _unread_timer was set
        self._is_in_head = False
        self._is_upgrade = False  # whether the request asks for another protocol
        self._is_repeated_head = False  # see _read_on
        self._num_head_bytes = 0  # of the complete header fields
        # These bytes were received while the head was incomplete, before and after its complete
        # fields: a long field is not counted above until it is complete.
        self._num_raw_bytes = 0
        # The last response of this connection has this error. All later input is ignored.
        self._refusal: ApiError | None = None

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._gathering = GatheringTransport(transport, self._batch)
        super().connection_made(self._gathering)
        most = self._limits.max_connections
        if len(self.connections) > most:
            message = f"The server has {most} connections open, the maximum."
            self._refuse(ApiError(503, message, code="too_many_connections", retry_after_s=1))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self._stop_watching_reader()
        self._unset_keepalive_if_required()
        if self._active is not None and not self._active.response_complete:
            _disconnect(self._active)
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        was_in_head = self._is_in_head
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else _no_http(data))
            return
        if self._is_in_head and was_in_head:
            self._num_raw_bytes += len(data)
            if self._num_raw_bytes > self._limits.max_header_bytes:
                self._refuse(self._head_too_large())
                return
        if self._deadline is None and (
            self._is_in_head or self.cycle is None or self.cycle.response_complete
        ):
            self._expect_head()  # also for blank lines between requests, which begin no request

    def _parse(self, data: bytes) -> None:
        while True:
            assert self.parser is not None
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                [num_parsed] = upgrade.args
                data = data[num_parsed:]
                self._read_on()

    def _read_on(self) -> None:
        """Reads on after a head that asks for another protocol. No other protocol is supported, and
        such a request is like any other; Java's client asks with every request. But the parser has
        ended at its head: a new one, which receives the head again without that wish, reads its
        body and what follows.
        """
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._is_upgrade, self._is_repeated_head = False, True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing))
            # The parser reads to the end of the head. Without a body, the request ends there.
            self.parser.feed_data(b"\r\n")
        finally:
            self._is_repeated_head = False

    # ------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        if self._is_repeated_head:
            return
        self._is_in_head = True
        self._num_head_bytes = self._num_raw_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_repeated_head:
            return
        self._num_head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # not in the trailer of a chunked body
            self._num_head_bytes += len(name) + len(value) + 4
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_repeated_head:
            return
        self._is_in_head = False
        self._clear_deadline()
        if self._num_head_bytes > self._limits.max_header_bytes:
            raise self._head_too_large()
        if len(self.pipeline) >= MAX_PIPELINED:
            message = f"At most {MAX_PIPELINED} requests can be sent ahead of their answers."
            raise ApiError(400, message, code="too_many_pipelined")
        assert self.parser is not None
        self._is_upgrade = self.parser.should_upgrade()
        super().on_headers_complete()
        if not self.cycle.keep_alive:
            self.cycle.transport = LastAnswer(self, self.cycle)
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _without_chunks(self.cycle)
        assert "state" in self.scope  # set by uvicorn
        self.scope["state"]["chunk_writer"] = ChunkWriter(self.cycle)
        self.scope["state"]["disconnected"] = self.loop.create_future()

    def on_message_complete(self) -> None:
        if self._is_upgrade:  # see _read_on
            return
        super().on_message_complete()
        self.cycle.more_body = False
        # uvicorn pauses during a large body. While it is paused, no end of the connection is seen.
        if self.cycle is self._active:
            self.flow.resume_reading()
        # The request was answered before it was complete: see on_response_complete.
        if self.cycle.response_complete:
            self._clear_deadline()
            if self.cycle.keep_alive:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            else:
                self.transport.close()

    # ------------------------------------------------------------ requests

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        assert self._active is not None
        # What the server still does about the request, such as logging it, does not delay it.
        self._gathering.flush()
        is_last, is_early = self._active is self.cycle or not self.pipeline, self._active.more_body
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()  # the end of the response may stay unread
        elif self._refusal is not None and is_last:
            self._send_refusal()
        elif is_early and self._deadline is None:
            # The rest of its body is discarded, for a limited time.
            self._unset_keepalive_if_required()
            self._set_deadline(LINGER_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def shutdown(self) -> None:
        super().shutdown()
        # Unread output, or a TLS client that does not close its side, must not delay the shutdown.
        if self.transport.is_closing():
            self._set_deadline(LINGER_S, self.transport.abort)

    # ------------------------------------------------------------ deadlines

    def _set_deadline(self, timeout_s: float, then: Callable[[], None]) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(timeout_s, then)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expect_head(self) -> None:
        self._set_deadline(self._limits.header_timeout_s, self._on_no_head)

    def _on_no_head(self) -> None:
        if not self._is_in_head:  # nothing was received: no client waits for a response
            self.transport.abort()
            return
        message = f"The headers did not arrive within {self._limits.header_timeout_s:g} s."
        self._refuse(ApiError(408, message, code="request_timeout"))

    def pause_writing(self) -> None:
        """Sets a deadline when the client reads more slowly than the server writes.

        From here on, the client has to read something within each write_timeout_s.
        """
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching_reader()

    def _watch_reader(self) -> None:
        self._stop_watching_reader()
        self._num_unread_bytes = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self._limits.write_timeout_s, self._on_unread)

    def _stop_watching_reader(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _on_unread(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unread_bytes:
            self._watch_reader()
            return
        logger.info(
            "a client has not read for %g s: closing its connection", self._limits.write_timeout_s
        )
        self._on_refused("write_timeout")
        self.transport.abort()

    # ------------------------------------------------------------ rejected requests

    def _head_too_large(self) -> ApiError:
        message = f"The headers must have at most {self._limits.max_header_bytes} bytes."
        return ApiError(431, message, code="headers_too_large")

    def _refuse(self, error: ApiError) -> None:
        """Sends `error` after all earlier responses, then ends the connection."""
        self._refusal = error
        self._clear_deadline()
        assert error.code is not None
        self._on_refused(error.code)
        cycle, active = self.cycle, self._active
        # The error concerns the body of this request.
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            if cycle is active:
                _disconnect(cycle)
                if cycle.response_started:
                    self.transport.abort()
                    return
            else:
                self.pipeline.popleft()
                cycle = active
        if cycle is None or cycle.response_complete or cycle.disconnected:
            self._send_refusal()

    def _send_refusal(self) -> None:
        error = self._refusal
        assert error is not None
        self._unset_keepalive_if_required()
        body = error.body(self.scope.get("path", "") if self.scope else "")
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": new_request_id([]),
            "openai-processing-ms": "0",  # no handler has run
            "connection": "close",
        }
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            *(f"{k}: {v}" for k, v in (headers | error.headers()).items()),
            "",
            "",
        ]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.close_lingering()

    def close_lingering(self) -> None:
        """Ends the connection of a client that may still be sending."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._set_deadline(LINGER_S, self.transport.abort)


class LastAnswer(asyncio.Transport):
    """The transport of a request whose response ends the connection. uvicorn would close it while
    the rest of the request still arrives.
    """

    def __init__(self, protocol: Protocol, cycle: RequestResponseCycle):
        self._protocol = protocol
        self._cycle = cycle
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        if self._cycle.more_body and not self._cycle.disconnected:
            self._protocol.close_lingering()
        else:
            self._protocol.transport.close()


class ChunkWriter:
    """Writes pieces of a streamed response like `send`, with less overhead."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._flow = cycle.flow

    def is_ready(self) -> bool:
        """Tells whether the response has begun and the write buffer has room.

        Otherwise use `send`, which can wait.
        """
        return (
            not self._flow.write_paused
            and self._cycle.chunked_encoding is True
            and not self._cycle.disconnected
        )

    def write(self, body: bytes) -> None:
        """`body` must not be empty: an empty chunk ends the response."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tells the handler of a request that its client is gone. It reads no further, and its output
    is discarded.
    """
    cycle.disconnected = True
    cycle.message_event.set()
    assert "state" in cycle.scope  # set by on_headers_complete
    disconnected = cycle.scope["state"]["disconnected"]
    if not disconnected.done():
        disconnected.set_result(None)


def _without_chunks(cycle: RequestResponseCycle) -> Callable[..., CoroutineType[Any, Any, None]]:
    """Wraps uvicorn's `send` for HTTP/1.0, which has no chunked encoding: a response without a
    length ends with the connection.
    """
    send = RequestResponseCycle.send

    async def send_plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
                cycle.chunked_encoding = False
        elif cycle.chunked_encoding is False and not cycle.expected_content_length:
            # uvicorn then finds the length that it expects.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(cycle, message)

    return send_plain


def _no_http(data: bytes) -> ApiError:
    message = "The request is not valid HTTP."
    if data.startswith(TLS_HANDSHAKE):
        message += " It looks like HTTPS; this port speaks plain HTTP."
    return ApiError(400, message, code="invalid_http")
