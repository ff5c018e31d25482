"""Call: the state of one HTTP request in the server, and the reading of its body.

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
from functools import partial
from typing import Any

from starlette.requests import Request

from ....ipc.lora import LoRARequest
from ....ipc.params import MAX_TIMEOUT_S
from ..admission import in_turn
from ..config import ServerConfig
from .bodies import Body, decode
from .content_encoding import decoder
from .errors import ApiError, invalid

# times max_body_bytes: the limit for the bodies of all active requests together
MAX_LARGE_BODIES = 16
LARGE_BODY = 256 * 2**10  # bytes; decoded in a thread
OVERLOADED_RETRY_S = 5.0
SMALL_CHUNK = 1024  # compressed bytes; at most 1 MiB decompressed, about one millisecond of work
MAX_NAMES = 20  # maximum number of field names in one header
# The x-request-id values accepted from a client: printable ASCII without spaces.
USERS_ID = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class Call:
    """The state of one request: app.py sets scope["state"]["call"]."""

    request_id: str  # sent as x-request-id of the response
    began: float  # start, by the event loop's clock
    task: asyncio.Task
    path: str = ""  # path of the URL
    tenant: str = ""  # digest of the key; never the key itself
    weight: float = 1.0  # of the key
    deadline: float | None = None  # from x-timeout-s, by time.monotonic()
    lora_request: LoRARequest | None = None  # the adapter that `model` names
    unknown_params: list[str] = field(default_factory=list)  # unknown fields of the body
    # Fields that the API defines and that have no effect here.
    ignored_params: list[str] = field(default_factory=list)
    num_body_bytes: int = 0  # bytes received so far
    body: bytearray | None = None  # received before the handler was chosen
    is_disconnected: bool = False
    # Done when the client has disconnected, where the server provides it (protocol.py).
    disconnected: asyncio.Future[None] | None = None
    watcher: asyncio.Task | None = None  # of a server that does not
    # The server's ASGI callable. Once a response has started, no middleware modifies what is sent.
    send: Any = None
    chunk_writer: Any = None  # ChunkWriter of protocol.py, where the server provides one
    # By the event loop's clock: when the last piece of a stream was sent; during a send, when it
    # began.
    last_sent: float = 0.0

    @property
    def suffix(self) -> str:
        """Suffix of ids in the response: chatcmpl-<suffix>."""
        return self.request_id.removeprefix("req-")

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """Headers added to every response. `now`: by the event loop's clock."""
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % round(1000 * (now - self.began))),
        ]
        if self.path.startswith("/v1/messages"):
            headers.append((b"request-id", headers[0][1]))  # Anthropic's name of the header
        for name, params in (
            (b"x-unknown-params", self.unknown_params),
            (b"x-ignored-params", self.ignored_params),
        ):
            if params:
                shown = params[:MAX_NAMES]
                if len(params) > MAX_NAMES:
                    shown = [*shown, f"and {len(params) - MAX_NAMES} more"]
                # Replaces line breaks and everything else that a header must not contain.
                headers.append((name, ",".join(shown).encode("unicode_escape")[:2000]))
        return headers

    def push(self, write_down: Callable[[Any], bytes], item: Any) -> bool:
        """Writes the piece of a stream that `write_down` makes of `item`, without waking the task
        that feeds the stream.

        Returns False, with no side effect, if the piece cannot be written at once: before the
        stream's first piece, or when the client reads too slowly.
        """
        writer = self.chunk_writer
        if writer is None or not writer.is_ready():
            return False
        if piece := write_down(item):
            # The event loop's clock; looking up the running loop would cost a system call.
            self.last_sent = time.monotonic()
            writer.write(piece)
        return True


def call_of(request: Request) -> Call:
    return request.scope["state"]["call"]


def read_deadline(headers: list[tuple[bytes, bytes]]) -> float | None:
    """The end of the time that the client gives in x-timeout-s, by time.monotonic(). Raises
    ApiError 400 for a value that is no time.
    """
    for name, value in headers:
        if name == b"x-timeout-s":
            try:
                timeout_s = float(value)
            except ValueError:
                timeout_s = 0.0
            if not 0 < timeout_s <= MAX_TIMEOUT_S:
                raise invalid(
                    "x-timeout-s",
                    f"'x-timeout-s' must be a number of seconds greater than 0 and at most "
                    f"{MAX_TIMEOUT_S:g}.",
                )
            return time.monotonic() + timeout_s
    return None


def new_request_id(headers: list[tuple[bytes, bytes]]) -> str:
    """Returns the client's x-request-id if it is acceptable, else a new id."""
    for name, value in headers:
        if name == b"x-request-id" and USERS_ID.fullmatch(text := value.decode("latin-1")):
            return text
    return f"req-{secrets.token_hex(12)}"


async def read_body(request: Request, config: ServerConfig, body_type: type[Body]) -> Body:
    """Receives, decodes and checks the body.

    From here on, the handler's task is cancelled when the client disconnects.

    Raises ApiError: 413 if the body is too large, 408 if it arrives too slowly, 400 with `param` if
    its content is wrong.
    """
    call = call_of(request)
    if call.body is None:
        await receive_body(request, config)
    raw, call.body = call.body or bytearray(), None
    if len(raw) < LARGE_BODY:
        return decode_body(raw, body_type, config, call)
    turns = request.scope["app"].state.work_turns
    return await in_turn(turns, call, partial(decode_body, raw, body_type, config, call))


async def receive_body(request: Request, config: ServerConfig) -> bytearray:
    """Receives the body, and keeps it for `read_body`. Raises ApiError 413 or 408, as there."""
    call = call_of(request)
    call.body = await _receive(request, config)
    watch_disconnect(request, call)
    return call.body


def release_memory() -> None:
    """Returns the memory of large bodies and texts to the system; the C library would keep it."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc only
        trim(0)


def too_large(config: ServerConfig) -> ApiError:
    return ApiError(
        413, f"The body must have at most {config.max_body_bytes} bytes.", code="request_too_large"
    )


async def _receive(request: Request, config: ServerConfig) -> bytearray:
    headers = dict(request.scope["headers"])  # starlette's decode all of them at each look
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > config.max_body_bytes:
        raise too_large(config)
    encoding = headers.get(b"content-encoding", b"").decode("latin-1")
    gunzip = decoder(encoding, config.max_body_bytes)
    body = bytearray()  # not a list of chunks: a slow client may send one byte per chunk
    call, meters = call_of(request), request.scope["app"].state.meters
    try:
        async with asyncio.timeout(config.body_timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    problem = "The client left before its request was complete."
                    raise ApiError(400, problem, code="client_disconnected")
                chunk = message.get("body", b"")
                if gunzip is not None and len(chunk) < SMALL_CHUNK:
                    chunk = gunzip.feed(chunk)
                elif gunzip is not None:
                    turns = request.scope["app"].state.work_turns
                    chunk = await in_turn(turns, call, partial(gunzip.feed, chunk))
                body += chunk
                call.num_body_bytes += len(chunk)
                meters.add_body_bytes(len(chunk))
                if len(body) > config.max_body_bytes:
                    raise too_large(config)
                if meters.num_body_bytes > MAX_LARGE_BODIES * config.max_body_bytes:
                    raise ApiError(
                        503,
                        "The bodies of all active requests are too large together.",
                        code="overloaded",
                        retry_after_s=OVERLOADED_RETRY_S,
                    )
                if not message.get("more_body"):
                    if gunzip is not None:
                        gunzip.end()
                    return body
    except TimeoutError:
        message = f"The body did not arrive within {config.body_timeout_s:g} s."
        raise ApiError(408, message, code="request_timeout") from None


def watch_disconnect(request: Request, call: Call) -> None:
    """Cancels the handler's task when the client disconnects, whether the task streams or computes.

    The body must have been read.
    """

    def on_disconnect(_: object = None) -> None:
        call.is_disconnected = True
        call.task.cancel()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    if call.disconnected is not None:
        call.disconnected.add_done_callback(on_disconnect)
    else:
        call.watcher = asyncio.get_running_loop().create_task(watch())


def decode_body(
    raw: bytes | bytearray, body_type: type[Body], config: ServerConfig, call: Call
) -> Body:
    """Decodes JSON into a Struct; unknown fields are noted or rejected."""
    body, unknown = decode(raw, body_type, find_unknown=config.unknown_params != "allow")
    note_unknown(unknown, config, call)
    return body


def note_unknown(names: Iterable[str], config: ServerConfig, call: Call) -> None:
    """Adds the paths of fields that are unknown or have no effect to the header x-unknown-
    params.
    """
    if config.unknown_params == "allow" or not (unknown := sorted(names)):
        return
    if config.unknown_params == "error":
        raise invalid(unknown[0], f"Unknown parameter: '{unknown[0]}'.", "unknown_parameter")
    call.unknown_params += unknown
