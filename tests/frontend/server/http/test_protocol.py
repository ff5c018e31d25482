"""The protocol over real sockets around a small app: incomplete requests, size limits, invalid
HTTP, and clients that do not read.
"""

from __future__ import annotations

import asyncio
import functools
import json
import select
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
import uvloop
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http import protocol
from quire.frontend.server.http.acceptor import AcceptingServer
from quire.frontend.server.http.protocol import MAX_PIPELINED, Protocol
from quire.frontend.server.http.write_batch import WriteBatch

OK = b"GET /ok HTTP/1.1\r\n\r\n"
BIG = 16 * 2**20  # bytes, more than any buffer between two sockets


class Served:
    """What a test receives: the port, the codes of refusals, and the requests seen by the app."""

    def __init__(self, limits: ServerConfig):
        self.limits = limits
        self.refused: Counter[str] = Counter()
        self.has_begun = asyncio.Event()  # the app has been called
        self.disconnected = asyncio.Event()
        self.release = asyncio.Event()  # lets /wait continue
        # a client whose answer must have left when `send` returns, and whether it had
        self.client: socket.socket | None = None
        self.has_left = False
        self.port = 0
        self.server: uvicorn.Server | None = None
        self.make_protocol: Callable[[], Protocol]

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.has_begun.set()
        if scope["path"] == "/echo":
            return await self.echo(receive, send)
        if scope["path"] == "/read":
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass
        elif scope["path"] == "/wait":
            await self.release.wait()
        elif scope["path"] == "/gone":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.disconnected.set()
        elif scope["path"] == "/left":
            while (await receive())["more_body"]:
                pass
            await scope["state"]["disconnected"]
            self.disconnected.set()
        elif scope["path"] == "/parts":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in (b"one ", b"two "):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            return await send({"type": "http.response.body", "body": b""})
        body = b"x" * BIG if scope["path"] == "/big" else b"ok"
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", str(len(body)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": body})
        if self.client is not None:
            self.has_left = bool(select.select([self.client], [], [], 5)[0])

    async def echo(self, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def send_and_read(self, *chunks: bytes, timeout_s: float = 60.0) -> bytes:
        """Send, and return everything that comes back until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = bytearray()

        async def listen() -> None:
            with suppress(ConnectionError):  # the connection was cut off
                while data := await reader.read(2**16):
                    answer.extend(data)

        listening = asyncio.create_task(listen())
        try:
            # raised by uvloop for a connection that has ended
            with suppress(ConnectionError, RuntimeError):
                for chunk in chunks:
                    writer.write(chunk)
                    await writer.drain()
                    await asyncio.sleep(0.01)
            await asyncio.wait_for(listening, timeout_s)
            return bytes(answer)
        finally:
            writer.transport.abort()


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


def serving(test: Callable[[Served], Awaitable[None]], **limits: Any) -> None:
    """Run `test` with a server that has these limits."""

    async def run() -> None:
        served = Served(ServerConfig(**limits))
        http = functools.partial(
            Protocol,
            limits=served.limits,
            batch=WriteBatch(),
            on_refused=lambda code: served.refused.update([code]),
        )
        config = uvicorn.Config(
            served.app,
            http=http,
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            log_config=None,
            timeout_keep_alive=served.limits.keep_alive_timeout_s,
            timeout_graceful_shutdown=1,
        )
        served.server = AcceptingServer(config, served.limits)
        served.make_protocol = lambda: http(
            config=config, server_state=served.server.server_state, app_state={}
        )
        listener = socket.create_server(("127.0.0.1", 0))
        served.port = listener.getsockname()[1]
        task = asyncio.create_task(served.server._serve([listener]))
        try:
            while not served.server.started:
                await asyncio.sleep(0.005)
            await asyncio.wait_for(test(served), 60)
        finally:
            served.server.should_exit = served.server.force_exit = True
            served.release.set()
            await task

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def error_in(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Return (status, error object) of the last answer, which must be complete and in the API's
    format.
    """
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:])
    assert (
        len(body) == int(headers["content-length"])
        and headers["content-type"] == "application/json"
    )
    assert headers["x-request-id"].startswith("req-") and headers["connection"] == "close"
    assert headers["openai-processing-ms"] == "0"
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    return int(head.split()[1]), error


REFUSED = [
    ([b"GET /ok HTTP/1.1\r\nX-Some: "], 408, "request_timeout"),
    ([b"G"], 408, "request_timeout"),
    ([OK, b"GET"], 408, "request_timeout"),
    ([b"GET /ok HTTP/1.1\r\n", *[b"a: b\r\n"] * 100], 408, "request_timeout"),
    ([b"GET /ok HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n"], 431, "headers_too_large"),
    ([b"GET /ok HTTP/1.1\r\nX: ", *[b"a" * 1000] * 10], 431, "headers_too_large"),
    ([b"GET /ok HTTP/1.1\r\n", *[b"a: b\r\n" * 100] * 20], 431, "headers_too_large"),
    ([b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n"], 431, "headers_too_large"),
    ([b"hello\r\n\r\n"], 400, "invalid_http"),
    ([b"\x16\x03\x01\x02\x00\x01"], 400, "invalid_http"),
    ([b"CONNECT example.org:80 HTTP/1.1\r\n\r\n"], 400, "invalid_http"),
    ([b"GET /\xff HTTP/1.1\r\n\r\n"], 400, "invalid_http"),
    ([b"GET /ok HTTP/1.1\r\nX: a\x00b\r\n\r\n"], 400, "invalid_http"),
    (
        [b"POST /ok HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd"],
        400,
        "invalid_http",
    ),
    (
        [b"POST /ok HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc"],
        400,
        "invalid_http",
    ),
    (
        [b"POST /read HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"3\r\nabc\r\nzz\r\n"],
        400,
        "invalid_http",
    ),
    ([OK * 2, b"nonsense\r\n\r\n"], 400, "invalid_http"),
    ([OK * (MAX_PIPELINED + 5)], 400, "too_many_pipelined"),
]


def test_invalid_requests_are_refused_before_the_app() -> None:
    async def test(served: Served) -> None:
        answers = await asyncio.gather(*(served.send_and_read(*said) for said, _, _ in REFUSED))
        for (said, status, code), answer in zip(REFUSED, answers, strict=True):
            got, error = error_in(answer)
            assert (got, error["code"]) == (status, code), said[0][:50]
            if code == "too_many_pipelined":
                # one running request, and those that wait behind it
                assert answer.count(b"200 OK") == MAX_PIPELINED + 1
            elif said[0].startswith(OK):
                assert answer.count(b"200 OK") == said[0].count(OK)
            if said[0][:1] == b"\x16":
                assert "HTTPS" in error["message"]
        assert served.refused == Counter(code for _, _, code in REFUSED)

    serving(test, header_timeout_s=1.5, max_header_bytes=8000)


def test_a_silent_client_is_closed_without_an_answer() -> None:
    async def test(served: Served) -> None:
        assert (
            await served.send_and_read() == b""
            and await served.send_and_read(b"\r\n") == b""
            and not served.refused
        )
        # and after an answer: keep_alive_timeout_s
        assert (await served.send_and_read(OK)).count(b"200 OK") == 1
        # blank lines do not extend the deadline
        assert (await served.send_and_read(OK, *[b"\r\n"] * 30)).count(b"200 OK") == 1

    serving(test, header_timeout_s=0.2, keep_alive_timeout_s=0.2)


def test_too_many_connections() -> None:
    async def test(served: Served) -> None:
        held = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]
        await until(lambda: len(served.server.server_state.connections) == 3)
        status, error = error_in(await served.send_and_read())
        assert (status, error["code"]) == (503, "too_many_connections") and served.refused[
            "too_many_connections"
        ] == 1
        held[0][1].transport.abort()
        await until(lambda: len(served.server.server_state.connections) == 2)
        held[1][1].write(OK)
        assert await held[1][0].readuntil(b"\r\n\r\nok")
        for _, writer in held:
            writer.transport.abort()

    serving(test, max_connections=3)


def test_an_answer_before_the_end_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.7)

    async def test(served: Served) -> None:
        # the rest arrives, so the connection continues
        head = b"POST /ok HTTP/1.1\r\ncontent-length: 20\r\n\r\n"
        assert (await served.send_and_read(head, b"x" * 20 + OK)).count(b"200 OK") == 2
        # the rest does not arrive: the connection ends, though single bytes do
        assert (
            await served.send_and_read(
                b"POST /ok HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n", *[b"x"] * 500
            )
        ).endswith(b"ok")
        # a large body: the client still gets its answer, even the last one of its connection
        for version in (b"1.1\r\n", b"1.1\r\nconnection: close\r\n", b"1.0\r\n"):
            assert b"200 OK" in await served.send_and_read(
                b"POST /ok HTTP/" + version + b"content-length: 20000000\r\n\r\n", b"x" * 20_000_000
            )

    serving(test, keep_alive_timeout_s=0.3)


def test_an_error_after_a_request_waits_for_its_answer() -> None:
    async def test(served: Served) -> None:
        asking = asyncio.create_task(
            served.send_and_read(b"GET /wait HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n")
        )
        await until(lambda: served.refused["invalid_http"] == 1)
        await asyncio.sleep(0.05)
        assert not asking.done()
        served.release.set()
        answer = await asking
        assert (
            answer.index(b"200 OK") < answer.index(b"\r\n\r\nok") < answer.index(b"400 Bad Request")
        )

    serving(test)


@pytest.mark.parametrize("extra", [b"", OK])
def test_a_disconnect_reaches_the_running_request(extra: bytes) -> None:
    async def test(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /gone HTTP/1.1\r\n\r\n" + extra)
        await served.has_begun.wait()
        writer.transport.abort()
        await asyncio.wait_for(served.disconnected.wait(), 60)

    serving(test)


@pytest.mark.parametrize("size", [1, 2**18])  # after a large body uvicorn has paused reading
def test_a_disconnect_reaches_a_request_that_has_been_read(size: int) -> None:
    async def test(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST /left HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        await writer.drain()
        await served.has_begun.wait()
        await asyncio.sleep(0.05)  # it has been read
        writer.transport.abort()
        await asyncio.wait_for(served.disconnected.wait(), 60)

    serving(test)


def test_a_whole_response_does_not_wait_for_the_next_turn_of_the_loop() -> None:
    async def test(served: Served) -> None:
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            served.client = client
            client.sendall(OK)
            while not served.has_left:
                await asyncio.sleep(0.01)

    serving(test)


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off() -> None:
    async def test(served: Served) -> None:
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
            while not served.refused["write_timeout"]:
                assert b"200 OK" in await served.send_and_read(
                    OK
                )  # other clients are served in the meantime
            await until(lambda: not served.server.server_state.connections)
        # a slow reader is not cut off
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /big HTTP/1.1\r\nconnection: close\r\n\r\n")
        num_bytes = 0
        while chunk := await reader.read(2**19):
            num_bytes += len(chunk)
            await asyncio.sleep(0.02)
        assert num_bytes > BIG and served.refused["write_timeout"] == 1

    serving(test, write_timeout_s=2, keep_alive_timeout_s=0.05)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
# A body that looks like a request.
INNER = b"GET /ok HTTP/1.1\r\nupgrade: h2c\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(INNER) + INNER
CHUNKED = (
    b"Transfer-Encoding: chunked\r\n\r\n5;a=b\r\nGET /\r\n"
    + b"%x\r\n%b\r\n0\r\nUpgrade: h2c\r\n\r\n" % (len(INNER) - 5, INNER[5:])
)
POST = b"POST /echo HTTP/1.1\r\nHost: a\r\n"
# Request -> the bodies of its answers, after which the connection still works.
ANSWERED = {
    OK: [b"ok"],
    b"\r\n\r\n" + OK: [b"ok"],
    OK * 3: [b"ok"] * 3,
    b"GET http://a/ok?x=1 HTTP/1.1\r\nExpect: 100-continue\r\n\r\n": [b"ok"],
    POST + LENGTH: [INNER],
    POST + CHUNKED: [INNER],
    (POST + LENGTH + POST + CHUNKED) * 2: [INNER] * 4,
    b"GET /ok HTTP/1.1\r\n" + UPGRADE + b"\r\n": [b"ok"],
    b"GET /ok HTTP/1.1\r\n" + UPGRADE + b"\r\n" + POST + LENGTH: [b"ok", INNER],
    POST + UPGRADE + LENGTH: [INNER],
    POST + UPGRADE + CHUNKED + OK: [INNER, b"ok"],
    (POST + UPGRADE + LENGTH) * 2 + POST + CHUNKED: [INNER] * 3,
    POST + UPGRADE + b"Content-Length: 0\r\n\r\n" + OK: [b"", b"ok"],
    POST + b"UPGRADE:\twebsocket\r\nconnection:upgrade\r\n" + LENGTH: [INNER],
    POST + b"Upgrade: h2c\r\n" + LENGTH: [INNER],
    b"POST /ok HTTP/1.1\r\n" + UPGRADE + LENGTH + OK: [b"ok", b"ok"],  # it reads no body
}
LAST = b"GET /ok HTTP/1.1\r\nConnection: close\r\n\r\n"


class Wire(asyncio.Transport):
    """What a connection sends, without a socket: pieces arrive exactly as they are cut."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.sent = b""
        self.is_over = False
        self.write_eof = self.close = self.abort = self._end
        self.pause_reading = self.resume_reading = lambda: None

    def write(self, data: bytes) -> None:
        self.sent += data

    def _end(self) -> None:
        self.is_over = True

    def is_closing(self) -> bool:
        return self.is_over

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    async def talk(self, served: Served, *pieces: bytes) -> bytes:
        """Everything that is sent until the connection ends."""
        http = served.make_protocol()
        http.connection_made(self)
        for piece in pieces:
            http.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(1000):  # turns of the event loop
            if self.is_over:
                break
            await asyncio.sleep(0)
        http.connection_lost(None)
        return self.sent


@pytest.mark.parametrize("number", range(len(ANSWERED)))
def test_a_request_cut_anywhere_is_the_same_request(number: int) -> None:
    """Also one that asks for another protocol, which is ignored."""
    request = list(ANSWERED)[number]
    said = [(request[:cut], request[cut:], LAST) for cut in range(1, len(request))]
    said += [(request + LAST,), (*(request[i : i + 1] for i in range(len(request))), LAST)]

    async def test(served: Served) -> None:
        for pieces in said:
            answer = await Wire().talk(served, *pieces)
            assert bodies_in(answer) == [*ANSWERED[request], b"ok"], pieces
        assert not served.refused

    serving(test)


def bodies_in(answers: bytes) -> list[bytes]:
    found = []
    while answers:
        head, _, answers = answers.partition(b"\r\n\r\n")
        if head == b"HTTP/1.1 100 Continue":
            continue
        assert head.startswith(b"HTTP/1.1 200 OK"), head
        [length] = [line for line in head.split(b"\r\n") if line.startswith(b"content-length: ")]
        num_bytes = int(length.split()[1])
        found.append(answers[:num_bytes])
        answers = answers[num_bytes:]
    return found


def test_a_refused_request_cut_anywhere_is_refused() -> None:
    wanted = [
        (b"".join(said), status, code)
        for said, status, code in REFUSED
        # a head without an end may have bytes beyond the limit in its first piece
        if code not in ("request_timeout", "too_many_pipelined", "headers_too_large")
        or b"\r\n\r\n" in said[-1]
    ]
    cuts = [
        (text[:cut], text[cut:], status, code)
        for text, status, code in wanted
        for cut in range(1, len(text), 1 if len(text) < 300 else len(text) // 20)
    ]

    async def test(served: Served) -> None:
        for *said, status, code in cuts:
            got, error = error_in(await Wire().talk(served, *said))
            assert (got, error["code"]) == (status, code), said

    serving(test, max_header_bytes=8000)


def test_http_1_0_gets_no_chunks() -> None:
    async def test(served: Served) -> None:
        assert (await served.send_and_read(b"GET /parts HTTP/1.0\r\n\r\n")).endswith(
            b"\r\n\r\none two "
        )
        assert b"chunked" not in await served.send_and_read(b"GET /parts HTTP/1.0\r\n\r\n")
        assert (await served.send_and_read(b"GET /ok HTTP/1.0\r\n\r\n")).endswith(
            b"content-length: 2\r\nconnection: close\r\n\r\nok"
        )
        assert (
            await served.send_and_read(b"GET /parts HTTP/1.1\r\nconnection: close\r\n\r\n")
        ).endswith(b"4\r\none \r\n4\r\ntwo \r\n0\r\n\r\n")

    serving(test)


def test_small_packets_are_not_delayed() -> None:
    async def test(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        await until(lambda: bool(served.server.server_state.connections))
        [connection] = served.server.server_state.connections
        assert connection.transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY
        )
        writer.transport.abort()

    serving(test)
