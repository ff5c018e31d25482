"""One connection: uvicorn's HTTP protocol with the limits that it does not have: deadlines, sizes,
numbers, readers that do not read.

Must not know: routes, the engine, what an answer says.

    connected ──▶ idle ──first byte──▶ head ──▶ body ──▶ answer ──▶ idle …
                  header_timeout_s     header_timeout_s  app.py     write_timeout_s while it lies unread
                  (keep_alive_timeout_s after an answer)

A refusal comes after the answers that are still under way, then the connection ends: it is read on
for LINGER_S without looking at what comes, since closing it with something unread would make the
system take the refusal back (RST).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..config import ServerConfig
from .call import new_request_id
from .errors import ApiError
from .write_batch import GatheringTransport, WriteBatch

logger = logging.getLogger(__name__)
MAX_PIPELINED = 16  # requests that one connection may send ahead of the answers
LINGER_S = 2.0
SPARE_CONNECTIONS = 256  # beyond max_connections are told why; beyond these they are cut off
UPGRADE = re.compile(rb"(?im)^upgrade(?=:)")
TLS_HANDSHAKE = b"\x16"  # the first byte of HTTPS


class Protocol(HttpToolsProtocol):
    """`on_refused` is told the code of each refusal. Connections of one `batch` write together."""

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
        # whose answer is under way; uvicorn's `cycle` is the newest, which may wait behind it
        self._active: RequestResponseCycle | None = None
        self._deadline: asyncio.TimerHandle | None = None  # for what the client has to send next
        self._unread_timer: asyncio.TimerHandle | None = None
        self._num_unread_bytes = 0  # when _unread_timer was set
        self._is_in_head = False
        self._num_head_bytes = 0  # of the fields that are complete
        # that came while the head was incomplete before and after them: a long field is not yet
        # among those above
        self._num_raw_bytes = 0
        # the last thing this connection is told; nothing it sends is looked at any more
        self._refusal: ApiError | None = None

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(GatheringTransport(transport, self._batch))
        num_over = len(self.connections) - self._limits.max_connections
        if num_over > SPARE_CONNECTIONS:
            transport.abort()
        elif num_over > 0:
            message = (
                f"The server has {self._limits.max_connections} connections open and takes no more."
            )
            self._refuse(ApiError(503, message, code="too_many_connections", retry_after_s=1))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._stop_watching_reader()
        self._unset_keepalive_if_required()
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        was_in_head = self._is_in_head
        if was_in_head or self.cycle is None or not self.cycle.more_body:
            data = _without_upgrade(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # a header that came in pieces: the request is answered, but if it had a body that is
            # lost
            return
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
            self._expect_head()  # also for blank lines between requests, which begin none

    # ------------------------------------------------------------ the parser's calls

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_head_bytes = self._num_raw_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._num_head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # not of a chunked body's trailer
            self._num_head_bytes += len(name) + len(value) + 4
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._set_deadline(None)
        if self._num_head_bytes > self._limits.max_header_bytes:
            raise self._head_too_large()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ApiError(
                400,
                f"At most {MAX_PIPELINED} requests can be sent ahead of their answers.",
                code="too_many_pipelined",
            )
        super().on_headers_complete()
        if not self.cycle.keep_alive:
            self.cycle.transport = LastAnswer(self, self.cycle)
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _without_chunks(self.cycle)
        self.scope["state"]["chunk_writer"] = ChunkWriter(self.cycle)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.cycle.more_body = False
        # answered before it was complete: see on_response_complete
        if self.cycle.response_complete:
            self._set_deadline(None)
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
        is_last, is_early = self._active is self.cycle or not self.pipeline, self._active.more_body
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()  # its end may lie unread for ever
        elif self._refusal is not None and is_last:
            self._send_refusal()
        elif is_early and self._deadline is None:
            # the rest of its body is thrown away, for a while
            self._unset_keepalive_if_required()
            self._set_deadline(LINGER_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def shutdown(self) -> None:
        super().shutdown()
        # what lies unread, or a TLS client that does not say goodbye, must not hold up the server's
        # end
        if self.transport.is_closing():
            self._set_deadline(LINGER_S, self.transport.abort)

    # ------------------------------------------------------------ deadlines

    def _set_deadline(
        self, timeout_s: float | None, then: Callable[[], None] | None = None
    ) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if timeout_s is None else self.loop.call_later(timeout_s, then)

    def _expect_head(self) -> None:
        self._set_deadline(self._limits.header_timeout_s, self._on_no_head)

    def _on_no_head(self) -> None:
        if not self._is_in_head:  # it never said anything: nobody waits for an answer
            self.transport.abort()
            return
        self._refuse(
            ApiError(
                408,
                f"The headers did not arrive within {self._limits.header_timeout_s:g} s.",
                code="request_timeout",
            )
        )

    def pause_writing(self) -> None:
        """The client reads slower than we write.

        From here on it has to read something within each write_timeout_s.
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
        logger.info("a client has not read for %g s and is cut off", self._limits.write_timeout_s)
        self._on_refused("write_timeout")
        self.transport.abort()

    # ------------------------------------------------------------ refusals

    def _head_too_large(self) -> ApiError:
        return ApiError(
            431,
            f"The headers must have at most {self._limits.max_header_bytes} bytes.",
            code="headers_too_large",
        )

    def _refuse(self, error: ApiError) -> None:
        """Answers `error` when everything before it has been answered, and ends the connection."""
        self._refusal = error
        self._set_deadline(None)
        self._on_refused(error.code)
        cycle, active = self.cycle, self._active
        # it is this request's body that is wrong
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            if cycle is active:
                # its handler reads no further, and what it answers goes nowhere
                cycle.disconnected = True
                cycle.message_event.set()
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
        self._unset_keepalive_if_required()
        body = error.body(self.scope.get("path", "") if self.scope else "")
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": new_request_id([]),
            "connection": "close",
        }
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            *(f"{k}: {v}" for k, v in (headers | error.headers()).items()),
            "",
            "",
        ]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.linger()

    def linger(self) -> None:
        """The end, for a client that may still be sending."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._set_deadline(LINGER_S, self.transport.abort)


class LastAnswer:
    """The transport of a request whose answer ends the connection: uvicorn would close it while the
    rest of the request still comes.
    """

    def __init__(self, protocol: Protocol, cycle: RequestResponseCycle):
        self._protocol = protocol
        self._cycle = cycle
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        if self._cycle.more_body and not self._cycle.disconnected:
            self._protocol.linger()
        else:
            self._protocol.transport.close()


class ChunkWriter:
    """For streams: writes pieces of an answer as `send` would, with less ado."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._flow = cycle.flow

    def is_ready(self) -> bool:
        """The answer has begun, and what is written now has room.

        Else it has to be `send`, which can wait.
        """
        return (
            not self._flow.write_paused
            and self._cycle.chunked_encoding is True
            and not self._cycle.disconnected
        )

    def write(self, body: bytes) -> None:
        """`body` is not empty: an empty chunk would be the end."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """uvicorn's `send` for HTTP/1.0, which knows no chunks: an answer without a length ends with
    the connection.
    """
    send = RequestResponseCycle.send

    async def send_plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
                cycle.chunked_encoding = False
        elif cycle.chunked_encoding is False and not cycle.expected_content_length:
            # so much is expected, and no more comes
            cycle.expected_content_length = len(message.get("body", b""))
        await send(cycle, message)

    return send_plain


def _without_upgrade(data: bytes) -> bytes:
    """We speak nothing else, and the parser would take the body of who asks for it as no part of
    HTTP. Java's client asks with every request.
    """
    if b"pgrade" not in data and b"PGRADE" not in data:
        return data
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    return UPGRADE.sub(b"x-upgrade", head) + data[len(head) :]


def _no_http(data: bytes) -> ApiError:
    hint = (
        " It looks like HTTPS; this port speaks plain HTTP."
        if data.startswith(TLS_HANDSHAKE)
        else ""
    )
    return ApiError(400, "The request is not valid HTTP." + hint, code="invalid_http")
