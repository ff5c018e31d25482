"""HttpClient: answers of every form, kept and lost connections, and a separate error for each
failure.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from quire import InvalidParameterError
from quire.frontend.bench.http_client import Failure, HttpClient
from quire.tests.scripted_server import (
    DIE,
    HANG,
    STREAM_HEAD,
    Script,
    ScriptedServer,
    answer,
    chunked,
    scripted_server,
)


def with_server(
    script: Script | Callable[[dict[str, Any]], Script],
    use: Callable[[HttpClient, ScriptedServer], Awaitable[Any]],
    timeout_s: float = 30,
) -> Any:
    async def main() -> Any:
        async with scripted_server(script) as (url, server):
            client = HttpClient(url + "/v1", {"authorization": "Bearer k"}, timeout_s)
            try:
                return await use(client, server)
            finally:
                client.close()

    return asyncio.run(main())


def exchange(script: Script, timeout_s: float = 30) -> tuple[int, bytes, bytes]:
    """Return (status, what on_data got, the body that was kept)."""

    async def use(client: HttpClient, server: ScriptedServer) -> tuple[int, bytes, bytes]:
        pieces: list[bytes] = []
        got = await client.exchange(
            "POST", "/completions", b'{"a": 1}', lambda data, now: pieces.append(data)
        )
        return got.status, b"".join(pieces), bytes(got.body)

    return with_server(script, use, timeout_s)


def failure(script: Script, timeout_s: float = 30) -> tuple[str, str]:
    with pytest.raises(Failure) as caught:
        exchange(script, timeout_s)
    return caught.value.kind, caught.value.text


def test_a_request_has_path_headers_and_body() -> None:
    async def use(client: HttpClient, server: ScriptedServer) -> None:
        await client.exchange("POST", "/completions", b'{"a": 1}')
        [request] = server.requests
        assert (request["method"], request["path"], request["body"]) == (
            "POST",
            "/v1/completions",
            {"a": 1},
        )
        assert (
            request["headers"]["authorization"] == "Bearer k"
            and request["headers"]["host"] == f"127.0.0.1:{client.port}"
        )

    with_server([answer("{}")], use)


@pytest.mark.parametrize(
    "script",
    [
        [answer("hello")],
        chunked(b"he", b"l", b"lo"),
        [bytes([byte]) for byte in b"".join(chunked(b"hello"))],
        # the end of the connection is the end of the body
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhel", b"lo"],
        [b"HTTP/1.0 200 OK\r\nconnection: close\r\n\r\nhello"],
        [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", answer("hello")],
    ],
    ids=["length", "chunked", "byte by byte", "until it closes", "http/1.0", "an interim answer"],
)
def test_bodies_of_every_form(script: Script) -> None:
    assert exchange(script) == (200, b"hello", b"")


def test_the_body_of_an_error_is_kept() -> None:
    assert exchange([answer("too much", "429 Too Many Requests")]) == (429, b"", b"too much")


def test_connections_are_kept_until_the_server_closes_them() -> None:
    async def use(client: HttpClient, server: ScriptedServer) -> None:
        for path in ("/models", "/models", "/close", "/models"):
            assert (await client.exchange("GET", path)).status == 200
        assert server.num_connections == 2

    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    with_server(lambda request: [closing if request["path"] == "/v1/close" else answer("{}")], use)


def test_a_stale_connection_is_replaced_once() -> None:
    """A server may close an idle connection just as the next request arrives. On a new connection
    the same is a failure.
    """

    async def use(client: HttpClient, server: ScriptedServer) -> None:
        for _ in range(2):
            assert (await client.exchange("GET", "/models")).status == 200
        assert (server.num_connections, len(server.requests)) == (2, 3)
        with pytest.raises(Failure, match="connection lost"):
            await client.exchange("GET", "/models")
        assert (server.num_connections, len(server.requests)) == (3, 5)

    answers = iter([[answer("1")], [DIE], [answer("2")], [DIE], [DIE]])
    with_server(lambda request: next(answers), use)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([DIE], "connection lost"),
        ([STREAM_HEAD, b"2\r\nhe\r\n", DIE], "connection lost"),
        (
            [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nhello"],
            "connection lost",
        ),
        ([STREAM_HEAD + b"zz\r\n"], "bad HTTP"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "bad HTTP"),
    ],
)
def test_a_server_that_breaks_off(script: Script, kind: str) -> None:
    assert failure(script)[0] == kind


def test_a_server_that_stops_sending() -> None:
    assert failure([STREAM_HEAD, HANG], timeout_s=0.05) == (
        "timeout",
        "no complete answer within 0.05 s",
    )


def test_an_error_of_the_reader_is_the_failure() -> None:
    async def use(client: HttpClient, server: ScriptedServer) -> None:
        def on_data(data: bytes, now: float) -> None:
            raise Failure("bad stream", "no")

        with pytest.raises(Failure, match="bad stream: no"):
            await client.exchange("POST", "/completions", b"", on_data)

    with_server(chunked(b"x"), use)


def test_no_listener() -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        client = HttpClient(f"http://127.0.0.1:{taken.getsockname()[1]}", {}, 5)
        with pytest.raises(Failure) as caught:
            asyncio.run(client.exchange("GET", "/models"))
    assert caught.value.kind == "connection refused"


def test_tls_to_a_server_without_tls() -> None:
    async def main() -> str:
        async def answer_anything(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer_anything, "127.0.0.1", 0)
        client = HttpClient(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, 30)
        with pytest.raises(Failure) as caught:
            await client.exchange("GET", "/models")
        server.close()
        return caught.value.kind

    assert asyncio.run(main()) == "TLS failed"


def test_no_such_host() -> None:
    with pytest.raises(Failure) as caught:
        asyncio.run(HttpClient("http://no-such-host.invalid:1", {}, 30).exchange("GET", "/models"))
    assert caught.value.kind == "connection failed"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999"])
def test_an_invalid_url(url: str) -> None:
    with pytest.raises(InvalidParameterError, match="--base-url"):
        HttpClient(url, {}, 5)


def test_a_cancelled_exchange_leaves_its_connection() -> None:
    async def use(client: HttpClient, server: ScriptedServer) -> None:
        task = asyncio.create_task(client.exchange("POST", "/completions", b"{}"))
        while not server.requests:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while server.num_open:  # the server notices
            await asyncio.sleep(0.001)

    with_server([STREAM_HEAD, HANG], use)
