"""An HTTP/1.1 client for load: persistent connections, and data passed on in the call that receives
it.

Must not know: event streams, JSON, what is measured.

Existing clients cost too much: a load generator that is slower than the server measures itself. Per
streamed chunk (64 streams, one segment per chunk, uvloop, tests/bench/bench_client.py) this client
takes about 20 us, httpx2 takes 120, and aiohttp, which would be a new dependency, takes 39. Most of
the 20 us is the system's: from the received bytes to the recorded time it is 3, because there is no
queue, no lock and no task to wake up per chunk.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import httptools

from ...ipc.errors import InvalidParameterError

MAX_KEPT_BODY = 2**20  # of an answer that is not a stream

# These are the kinds of failure as the report names them. A status other than 200 is named like
# "HTTP 429".
CONNECTION_REFUSED = "connection refused"
CONNECTION_FAILED = "connection failed"  # no such host, no route
TLS_FAILED = "TLS failed"  # a certificate that is not trusted, or no TLS at the other end
CONNECTION_LOST = "connection lost"  # after it was established, before the answer was complete
BAD_HTTP = "bad HTTP"
TIMEOUT = "timeout"

OnData = Callable[[bytes, float], None]


class Failure(Exception):
    """A failed request: `kind` for counting, `text` for the reader."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Answer:
    """An answer in progress.

    With status 200 `on_data` receives the body's pieces and their times; otherwise `body` keeps it.
    """

    def __init__(self, on_data: OnData | None):
        self.on_data = on_data
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, status: int) -> None:
        self.status = status

    def add(self, data: bytes, now: float) -> None:
        if self.on_data is not None and self.status == 200:
            self.on_data(data, now)
        elif len(self.body) < MAX_KEPT_BODY:
            self.body += data

    def finish(self, failure: Exception | None = None) -> None:
        if self.done.done():
            return
        if failure is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(failure)


class HttpConnection(asyncio.Protocol):
    """One connection with one request at a time. httptools calls the on_* methods from
    data_received.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._now = 0.0
        # if there are neither a length nor chunks, the body ends with the connection
        self._ends_with_connection = False
        self.received_anything = False
        self.is_reusable = False

    def send(self, request: bytes, answer: Answer) -> None:
        self._answer, self.received_anything, self.is_reusable = answer, False, False
        self.transport.write(request)

    def close(self) -> None:
        self._answer, self.is_reusable = None, False
        self.transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now, self.received_anything = perf_counter(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # raised by one of the on_* methods
            cause = error.__context__
            is_failure = isinstance(cause, Failure)
            self._fail(cause if is_failure else Failure(BAD_HTTP, str(cause or error)))
        except httptools.HttpParserError as error:
            self._fail(Failure(BAD_HTTP, str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if self._answer is not None and self._ends_with_connection and exc is None:
            self._answer.finish()
        else:
            closed = "the server closed the connection before the answer was complete"
            self._fail(Failure(CONNECTION_LOST, str(exc or closed)))

    def _fail(self, failure: Exception) -> None:
        if self._answer is not None:
            self._answer.finish(failure)
        self.close()

    # httptools

    def on_message_begin(self) -> None:
        self._ends_with_connection = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None:
            self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._answer is None:
            raise Failure(BAD_HTTP, "an answer without a request")
        self._answer.begin(self._parser.get_status_code())
        self._ends_with_connection = not self._answer.headers.keys() & {
            "content-length",
            "transfer-encoding",
        }

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.add(data, self._now)

    def on_message_complete(self) -> None:
        # an interim answer (103 Early Hints): the answer follows
        if self._parser.get_status_code() < 200:
            return
        answer, self._answer = self._answer, None
        self.is_reusable = self._parser.should_keep_alive()
        if answer is not None:
            answer.finish()


class HttpClient:
    """Sends requests to one server. `base_url` may have a path, which prefixes every request's
    path.
    """

    def __init__(self, base_url: str, headers: dict[str, str], timeout_s: float):
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise InvalidParameterError(
                "--base-url", f"must be like http://127.0.0.1:8000, got {base_url!r}"
            )
        try:
            self.host, self.port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        except ValueError:
            raise InvalidParameterError(
                "--base-url", f"has no port from 0 to 65535: {base_url!r}"
            ) from None
        self.path = url.path.rstrip("/")
        self.timeout_s = timeout_s
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        host = f"[{self.host}]" if ":" in self.host else self.host
        fixed = {"host": f"{host}:{self.port}", "user-agent": "quire-bench", "accept": "*/*"}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in (fixed | headers).items())
        self._idle: list[HttpConnection] = []

    async def exchange(
        self, method: str, path: str, body: bytes = b"", on_data: OnData | None = None
    ) -> Answer:
        """Returns the complete answer, whatever its status.

        Raises Failure. A Failure raised by on_data ends the exchange.
        """
        head = (
            f"{method} {self.path}{path} HTTP/1.1\r\n{self._head}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        request = head.encode("latin-1") + body
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._exchange(request, on_data)
        except TimeoutError:
            raise Failure(TIMEOUT, f"no complete answer within {self.timeout_s:g} s") from None

    async def _exchange(self, request: bytes, on_data: OnData | None) -> Answer:
        while True:
            kept = self._kept_connection()
            connection = kept or await self._connect()
            answer = Answer(on_data)
            connection.send(request, answer)
            try:
                await answer.done
            except Failure as failure:
                was_idle = kept is not None and not connection.received_anything
                if failure.kind != CONNECTION_LOST or not was_idle:
                    raise
                continue  # the server had closed the idle connection
            except BaseException:  # after a timeout or Ctrl-C, what arrives is unused
                connection.close()
                raise
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    def _kept_connection(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                HttpConnection, self.host, self.port, ssl=self._tls
            )
        except ConnectionRefusedError:
            raise Failure(
                CONNECTION_REFUSED, f"no server listens at {self.host} port {self.port}"
            ) from None
        except TimeoutError:
            raise
        except ssl.SSLError as error:
            raise Failure(TLS_FAILED, str(error)) from None
        except OSError as error:
            # for several addresses (::1 and 127.0.0.1) asyncio joins the messages
            is_refused = "refused" in str(error).lower()
            kind = CONNECTION_REFUSED if is_refused else CONNECTION_FAILED
            raise Failure(kind, str(error)) from None
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
