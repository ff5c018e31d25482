"""A small HTTP server that sends scripted bytes or resets the connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

DIE = object()  # in a script: reset the connection
HANG = object()  # say nothing more until the client leaves
Script = list[Any]  # bytes to send, each in a segment of its own, or one of the above


class ScriptedServer:
    """Runs the script that `answer(request)` returns.

    A request is {"method", "path", "headers", "body"}. All requests are kept in `requests`.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Script]):
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.num_connections = self.num_open = self.peak_open = 0
        self.handlers: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.handlers.add(asyncio.current_task())
        try:
            while request := await _read_request(reader):
                self.requests.append(request)
                self.num_open += 1
                self.peak_open = max(self.peak_open, self.num_open)
                try:
                    goes_on = await self._play(self.answer(request), reader, writer)
                finally:
                    self.num_open -= 1
                if not goes_on:
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            writer.close()

    async def _play(
        self, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        for part in script:
            if part is DIE:
                writer.transport.abort()
                return False
            if part is HANG:
                await reader.read()
                return False
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        return b"connection: close" not in b"".join(
            part for part in script if isinstance(part, bytes)
        )


async def _read_request(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode().rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return {
        "method": method,
        "path": path,
        "headers": headers,
        "body": json.loads(body) if body else None,
    }


@asynccontextmanager
async def scripted_server(
    answer: Callable[[dict[str, Any]], Script] | Script,
) -> AsyncIterator[tuple[str, ScriptedServer]]:
    """Run a server; yield (its URL, the server)."""
    server = ScriptedServer(answer if callable(answer) else lambda request: answer)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", server
    finally:
        listening.close()
        for handler in server.handlers:
            handler.cancel()
        await asyncio.gather(*server.handlers)


def answer(
    body: bytes | str, status: str = "200 OK", kind: str = "application/json", extra: str = ""
) -> bytes:
    """Return a complete response with a content-length."""
    body = body.encode() if isinstance(body, str) else body
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{extra}content-length: "
        f"{len(body)}\r\n\r\n".encode()
        + body
    )


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunked(*parts: bytes) -> list[bytes]:
    """Return the head of an event stream, each part as one HTTP chunk, and the final chunk."""
    return [STREAM_HEAD, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def completion_stream(texts: list[str], usage: dict[str, int] | None = None) -> list[bytes]:
    """Return the event stream of a /v1/completions server."""
    chunks = [event(choices=[{"index": 0, "text": text, "finish_reason": None}]) for text in texts]
    chunks.append(event(choices=[{"index": 0, "text": "", "finish_reason": "length"}]))
    if usage is not None:
        chunks.append(event(choices=[], usage=usage))
    return chunked(*chunks, b"data: [DONE]\n\n")


def chat_stream(texts: list[str]) -> list[bytes]:
    """Return the event stream of a /v1/chat/completions server."""
    deltas = [{"role": "assistant", "content": ""}, *({"content": text} for text in texts)]
    chunks = [
        event(choices=[{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas
    ]
    return chunked(
        *chunks,
        event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        b"data: [DONE]\n\n",
    )
