"""EventStream: order, errors before and inside a stream, keep-alive comments, readers that stop,
and cleanup in every case.
"""

import asyncio
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.http.sse import (
    COMMENT,
    LARGE_ANSWER,
    EventStream,
    around,
    event,
    json_of,
)


class Wire:
    """ASGI's send. `block` stops it, like a client that does not read."""

    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, message: dict) -> None:
        await self.open.wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.messages if m["type"] == "http.response.body")

    @property
    def is_complete(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False


def stream(
    events: AsyncIterator[bytes], wire: Wire, keep_alive_s: float = 60, write_timeout_s: float = 60
) -> tuple[asyncio.Task, HttpCall]:
    call = HttpCall("req-1", 0.0, None)
    answer = EventStream(
        events,
        call,
        on_error=lambda e: event({"error": str(e)}),
        keep_alive_s=keep_alive_s,
        write_timeout_s=write_timeout_s,
    )
    call.task = asyncio.ensure_future(answer({}, None, wire))
    return call.task, call


class Source:
    """A source of events that records whether it was closed."""

    def __init__(self, *steps: bytes | float | Exception):
        self.steps = steps
        self.is_closed = False

    async def __call__(self) -> AsyncIterator[bytes]:
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, bytes):
                    yield step
                else:
                    await asyncio.sleep(step)
        finally:
            self.is_closed = True


def test_events_in_order_and_an_end() -> None:
    async def run() -> None:
        wire, source = Wire(), Source(b"a", b"b")
        await stream(source(), wire)[0]
        assert wire.body == b"ab" and wire.is_complete and source.is_closed
        assert (
            wire.messages[0]["status"] == 200
            and (b"content-type", b"text/event-stream; charset=utf-8")
            in wire.messages[0]["headers"]
        )

    asyncio.run(run())


def test_a_failure_before_the_first_event_is_raised_for_a_proper_status() -> None:
    async def run() -> None:
        wire, source = Wire(), Source(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await stream(source(), wire)[0]
        assert wire.messages == [] and source.is_closed

    asyncio.run(run())


def test_a_failure_inside_is_the_last_event() -> None:
    async def run() -> None:
        wire, source = Wire(), Source(b"a", ValueError("no"))
        await stream(source(), wire)[0]
        assert wire.body == b'adata: {"error":"no"}\n\n' and wire.is_complete

    asyncio.run(run())


def test_keep_alive_comments_are_sent_only_in_silence() -> None:
    async def run() -> None:
        wire, source = Wire(), Source(0.35, b"a", b"b")
        await stream(source(), wire, keep_alive_s=0.1)[0]
        head, comments, tail = wire.body.partition(COMMENT)
        assert head == b"" and comments and tail.replace(COMMENT, b"") == b"ab" and wire.is_complete
        assert [m["type"] for m in wire.messages].count("http.response.start") == 1

    asyncio.run(run())


def test_a_client_that_does_not_read_is_closed() -> None:
    async def run() -> None:
        wire, source = Wire(), Source(b"a", 0.01, b"b", 5.0)
        task, call = stream(source(), wire, keep_alive_s=0.05, write_timeout_s=0.2)
        await asyncio.sleep(0)
        wire.open.clear()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
        assert call.is_disconnected and source.is_closed

    asyncio.run(run())


def test_a_cancelled_stream_closes_its_source() -> None:
    async def run() -> None:
        wire, source = Wire(), Source(b"a", 100.0)
        task, _ = stream(source(), wire)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.is_closed and not wire.is_complete

    asyncio.run(run())


def test_a_large_answer_is_encoded_in_a_thread() -> None:
    def where() -> str:
        return threading.current_thread().name

    async def run() -> list[bytes]:
        return [(await json_of(where, size)).body for size in (0, LARGE_ANSWER)]

    here, beside = asyncio.run(run())
    assert here == b'"MainThread"' and beside != here


def test_json_around_a_value_is_that_of_the_whole_in_two() -> None:
    class Inner(msgspec.Struct):
        left: int | msgspec.UnsetType = msgspec.UNSET
        text: str = "x"
        right: str | None = None

    whole = {"a": [1, 2.5], "b": [Inner(1), Inner(text=""), {"c": None}], "d": {"e": "é"}}
    for path in (("b", 0, "text"), ("b", 1, "text"), ("a", 1), ("d", "e"), ("b", 2, "c"), ("a",)):
        value = whole
        for step in path:
            value = getattr(value, step) if isinstance(value, Inner) else value[step]
        before, after = around(whole, path)
        assert before + msgspec.json.encode(value) + after == msgspec.json.encode(whole)
