"""Call: one HTTP request on its way through the server, and the reading of its body.

Must not know: routes, the engine.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from ..config import ServerConfig
from .bodies import Body, decode
from .content_encoding import decoder
from .errors import ApiError, invalid

# times max_body_bytes: what the bodies of all requests under way may have together
MAX_LARGE_BODIES = 16
LARGE_BODY = 256 * 2**10  # bytes; decoded in a thread
OVERLOADED_RETRY_S = 5.0
SMALL_CHUNK = 1024  # compressed bytes, at most 1 MiB decompressed: about a millisecond
MAX_NAMES = 20  # of fields, in one header
# what we take as x-request-id from a client: printable ASCII without spaces
USERS_ID = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class Call:
    """In scope["state"]["call"] of every request; made by app.py."""

    request_id: str  # the x-request-id of the answer
    began: float  # of the loop's clock
    task: asyncio.Task
    path: str = ""  # of its URL
    tenant: str = ""  # whose key it was: a digest, never the key itself
    unknown_params: list[str] = field(default_factory=list)  # fields of the body that nobody knows
    # fields that the API knows and that change nothing here
    ignored_params: list[str] = field(default_factory=list)
    num_body_bytes: int = 0  # that have come
    is_disconnected: bool = False
    watcher: asyncio.Task | None = None
    # ASGI's, as the server gave it: once an answer has started, nobody adds anything to what is
    # sent
    send: Any = None
    chunk_writer: Any = None  # protocol.py's ChunkWriter, where there is one
    # of the loop's clock: the last piece of a stream; while a send is under way, when it began
    last_sent: float = 0.0

    @property
    def suffix(self) -> str:
        """For ids in the answer: chatcmpl-<suffix>."""
        return self.request_id.removeprefix("req-")

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of every answer."""
        headers = [(b"x-request-id", self.request_id.encode())]
        if self.path.startswith("/v1/messages"):
            headers.append((b"request-id", headers[0][1]))  # Anthropic's name for it
        for name, params in (
            (b"x-unknown-params", self.unknown_params),
            (b"x-ignored-params", self.ignored_params),
        ):
            if params:
                shown = (
                    params
                    if len(params) <= MAX_NAMES
                    else [*params[:MAX_NAMES], f"and {len(params) - MAX_NAMES} more"]
                )
                # line breaks and all else that a header must not hold
                headers.append((name, ",".join(shown).encode("unicode_escape")[:2000]))
        return headers

    def push(self, write_down: Callable[[Any], bytes], news: Any) -> bool:
        """Writes the piece of a stream that `write_down` makes of `news`, past the task that feeds
        the stream. False, and nothing has been touched, where that cannot be done at once: before
        the stream's first piece, or when the client does not keep up.
        """
        writer = self.chunk_writer
        if writer is None or not writer.is_ready():
            return False
        if piece := write_down(news):
            # the loop's clock too; asking which loop runs would cost a system call
            self.last_sent = time.monotonic()
            writer.write(piece)
        return True


def call_of(request: Request) -> Call:
    return request.scope["state"]["call"]


def new_request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's own x-request-id where it sent a decent one."""
    for name, value in headers:
        if name == b"x-request-id" and USERS_ID.fullmatch(text := value.decode("latin-1")):
            return text
    return f"req-{secrets.token_hex(12)}"


async def read_body(request: Request, config: ServerConfig, body_type: type[Body]) -> Body:
    """The body, decoded and checked.

    From here on the handler's task is cancelled when the client goes away.

    Raises ApiError: 413 too large, 408 too slow, 400 for everything that is wrong in it, with
    `param`.
    """
    raw = await _receive(request, config)
    call = call_of(request)
    watch_disconnect(request, call)
    if len(raw) < LARGE_BODY:
        return decode_body(raw, body_type, config, call)
    return await asyncio.to_thread(decode_body, raw, body_type, config, call)


def release_memory() -> None:
    """Gives back to the system what large bodies and texts took, which the C library would keep."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


def too_large(config: ServerConfig) -> ApiError:
    return ApiError(
        413, f"The body must have at most {config.max_body_bytes} bytes.", code="request_too_large"
    )


async def _receive(request: Request, config: ServerConfig) -> bytearray:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > config.max_body_bytes:
        raise too_large(config)
    decode_chunk = decoder(request.headers.get("content-encoding", ""), config.max_body_bytes)
    body = bytearray()  # not a list of chunks: a dripping client may send one byte in each
    call, meters = call_of(request), request.scope["app"].state.meters
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(
                        400,
                        "The client left before its request was complete.",
                        code="client_disconnected",
                    )
                chunk = message.get("body", b"")
                if decode_chunk is not None and len(chunk) < SMALL_CHUNK:
                    chunk = decode_chunk.feed(chunk)
                elif decode_chunk is not None:
                    chunk = await asyncio.to_thread(decode_chunk.feed, chunk)
                body += chunk
                call.num_body_bytes += len(chunk)
                meters.num_body_bytes += len(chunk)
                if len(body) > config.max_body_bytes:
                    raise too_large(config)
                if meters.num_body_bytes > MAX_LARGE_BODIES * config.max_body_bytes:
                    raise ApiError(
                        503,
                        "The bodies of the requests under way are too large together.",
                        code="overloaded",
                        retry_after_s=OVERLOADED_RETRY_S,
                    )
                if not message.get("more_body"):
                    if decode_chunk is not None:
                        decode_chunk.end()
                    return body
    except TimeoutError:
        message = f"The body did not arrive within {config.body_timeout_s:g} s."
        raise ApiError(408, message, code="request_timeout") from None


def watch_disconnect(request: Request, call: Call) -> None:
    """Cancels the handler's task when the client goes away, whether it streams or computes.

    The body has been read.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        call.is_disconnected = True
        call.task.cancel()

    call.watcher = asyncio.get_running_loop().create_task(watch())


def decode_body(
    raw: bytes | bytearray, body_type: type[Body], config: ServerConfig, call: Call
) -> Body:
    """JSON -> Struct, with unknown fields noted or refused."""
    body, unknown = decode(raw, body_type, find_unknown=config.unknown_params != "allow")
    note_unknown(unknown, config, call)
    return body


def note_unknown(names: Iterable[str], config: ServerConfig, call: Call) -> None:
    """For the header x-unknown-params: fields, by their paths, that nobody knows or that change
    nothing here.
    """
    if config.unknown_params == "allow" or not (unknown := sorted(names)):
        return
    if config.unknown_params == "error":
        raise invalid(unknown[0], f"Unknown parameter: '{unknown[0]}'.", "unknown_parameter")
    call.unknown_params += unknown
