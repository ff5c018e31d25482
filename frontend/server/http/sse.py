"""Responses: JSON, and server-sent events with little overhead per event.

Must not know: the content of an event.

A stream's first event decides its status: a failure before it is an ordinary error response.
Comments are sent during silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from .call import HttpCall
from .errors import ENDS

logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
LARGE_ANSWER = 5000  # candidates of log-probabilities; encoding them takes some milliseconds
EVENT_STREAM = b"text/event-stream; charset=utf-8"
encode = msgspec.json.Encoder().encode


class JsonAnswer(Response):
    """A response with any value that msgspec can encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else encode(content)


async def json_of(make: Callable[[], Any], num_entries: int) -> JsonAnswer:
    """Returns the response that `make` returns.

    A large one is made in a thread, so that streams are not delayed.
    """
    if num_entries < LARGE_ANSWER:
        return JsonAnswer(make())
    return await asyncio.to_thread(lambda: JsonAnswer(make()))


def event(value: Any) -> bytes:
    """Encodes one `data:` event."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """Encodes one event with a name, for the APIs that name their events."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def around(value: Any, path: tuple[Any, ...]) -> tuple[bytes, bytes]:
    """Returns the JSON of a Struct, dict or list before and after the value at `path` (names,
    indices).
    """
    if not path:
        return b"", b""
    if isinstance(value, msgspec.Struct):
        value = {k: v for k, v in msgspec.structs.asdict(value).items() if v is not msgspec.UNSET}
    keys: list[Any] = list(range(len(value)) if isinstance(value, list) else value)
    place = keys.index(path[0])
    before, after = around(value[path[0]], path[1:])
    written = [encode(value[key]) for key in keys]
    if isinstance(value, dict):
        before = encode(path[0]) + b":" + before
        written = [encode(key) + b":" + text for key, text in zip(keys, written, strict=True)]
    opening, closing = (b"{", b"}") if isinstance(value, dict) else (b"[", b"]")
    return (
        opening + b"".join(text + b"," for text in written[:place]) + before,
        after + b"".join(b"," + text for text in written[place + 1 :]) + closing,
    )


@dataclass(eq=False)
class EventStream:
    """A response that sends `events` as they arrive.

    It is an ASGI application, which a handler returns in place of a Response.
    """

    # These are whole events, of which several may be joined. `aclose` closes them however the
    # stream ends, which aborts the requests that feed it.
    events: AsyncGenerator[bytes, None]
    call: HttpCall
    # This callable converts an exception to the last event. An exception before the first event
    # is raised instead, so that it sets the status.
    on_error: Callable[[BaseException], bytes]
    keep_alive_s: float  # of silence, after which `comment` is sent
    write_timeout_s: float  # for which a client may leave sent data unread
    comment: bytes | Callable[[], bytes] = COMMENT
    media_type: bytes = EVENT_STREAM
    _is_sending: bool = field(default=False, init=False)
    _has_started: bool = field(default=False, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _commenting: asyncio.Task | None = field(default=None, init=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        self.call.last_sent = loop.time()
        # The stream bypasses the wrappers of starlette and app.py, which handle only the start of a
        # response.
        send_body = self.call.send or send
        writer = self.call.chunk_writer
        self._arm(loop, send)
        try:
            async for chunk in self.events:
                if not self._has_started:
                    await self._start(send)
                if self._commenting is not None:
                    await self._commenting
                # The body of _write stands here, inlined: this runs for every token.
                self.call.last_sent = loop.time()
                if writer is not None and chunk and writer.is_ready():
                    writer.write(chunk)
                else:
                    self._is_sending = True
                    await send_body(
                        {"type": "http.response.body", "body": chunk, "more_body": True}
                    )
                    self._is_sending = False
            if not self._has_started:
                await self._start(send)
            self._disarm()
            await self._write(loop, send, b"", False)
        except ENDS:
            raise
        except BaseException as error:
            if not self._has_started:
                raise
            self._disarm()
            await self._write(loop, send, self.on_error(error), True)
            await self._write(loop, send, b"", False)
        finally:
            self._disarm()
            await self.events.aclose()

    async def _start(self, send: Any) -> None:
        self._has_started = True
        headers = [
            (b"content-type", self.media_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(
        self, loop: asyncio.AbstractEventLoop, send: Any, chunk: bytes, more: bool
    ) -> None:
        if self._commenting is not None:
            await self._commenting
        self.call.last_sent, self._is_sending = loop.time(), True
        await send({"type": "http.response.body", "body": chunk, "more_body": more})
        self._is_sending = False

    # ------------------------------------------------------------ silence and slow readers

    def _arm(self, loop: asyncio.AbstractEventLoop, send: Any) -> None:
        """Uses one timer for the whole stream, which checks the time of the last event; events do
        not touch the timer.
        """

        def tick() -> None:
            silent_s = loop.time() - self.call.last_sent
            is_sending = self._is_sending or self._commenting is not None
            if is_sending:
                if silent_s >= self.write_timeout_s:
                    logger.info(
                        "%s: the client has not read for %.0f s; its request is aborted",
                        self.call.request_id,
                        silent_s,
                    )
                    self.call.is_disconnected = True
                    self.call.task.cancel()
                    return
            elif silent_s >= self.keep_alive_s:
                self.call.last_sent = loop.time()
                self._commenting = loop.create_task(self._send_comment(send))
            due_s = self.write_timeout_s if is_sending else self.keep_alive_s
            self._timer = loop.call_later(
                max(0.01, self.call.last_sent + due_s - loop.time()), tick
            )

        self._timer = loop.call_later(self.keep_alive_s, tick)

    async def _send_comment(self, send: Any) -> None:
        if not self._has_started:
            await self._start(send)
        comment = self.comment if isinstance(self.comment, bytes) else self.comment()
        await send({"type": "http.response.body", "body": comment, "more_body": True})
        self._commenting = None

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
