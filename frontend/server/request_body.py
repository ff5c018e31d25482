"""Receives, decompresses, decodes and checks the body of a request.

Must not know: routes, the engine.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable
from functools import partial

import msgspec
from starlette.requests import Request

from .admission import in_turn
from .config import ServerConfig
from .http.bodies import Body, decode
from .http.call import HttpCall, call_of
from .http.errors import ApiError, invalid, unsupported

# The bodies of all active requests together may have this many times max_body_bytes.
MAX_LARGE_BODIES = 16
# Names of fields that carry images, sounds or vectors in other servers' APIs. Where a body does not
# have such a field, an answer without it would be about something else.
MEDIA = frozenset(
    {
        *("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds"),
        *("image", "images", "image_data", "image_url", "video", "videos", "video_url"),
        *("audio", "audios", "audio_url", "input_audio"),
    }
)
LARGE_BODY = 256 * 2**10  # bytes; decoded in a thread
OVERLOADED_RETRY_S = 5.0
SMALL_CHUNK = 1024  # compressed bytes; at most 1 MiB decompressed, about one millisecond of work


class Gunzip:
    """Decompresses gzip.

    Raises ApiError 413 as soon as the output exceeds `max_bytes`, regardless of the compressed
    size, and 400 for invalid gzip.
    """

    def __init__(self, max_bytes: int):
        self._room = max_bytes
        self._max_bytes = max_bytes
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 16)

    def feed(self, chunk: bytes) -> bytes:
        try:
            data = self._inflate.decompress(chunk, self._room + 1)
        except zlib.error as error:
            raise _bad(str(error)) from None
        self._room -= len(data)
        if self._room < 0:
            raise ApiError(
                413,
                f"The body must have at most {self._max_bytes} bytes, decompressed.",
                code="request_too_large",
            )
        if self._inflate.unused_data:
            raise _bad("data follow its end")
        return data

    def end(self) -> None:
        if not self._inflate.eof:
            raise _bad("it is truncated")


def decoder(content_encoding: str, max_bytes: int) -> Gunzip | None:
    """Returns the decoder for the request's content encoding, or None if the body is not
    compressed.

    Raises ApiError 415 for an encoding other than gzip.
    """
    name = content_encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name in ("gzip", "x-gzip"):
        return Gunzip(max_bytes)
    raise ApiError(
        415,
        f"The content encoding {name!r:.40} is not supported; gzip is.",
        code="unsupported_content_encoding",
    )


def _bad(problem: str) -> ApiError:
    return ApiError(400, f"The body is not valid gzip: {problem}.", code="invalid_gzip")


async def read_body(request: Request, config: ServerConfig, body_type: type[Body]) -> Body:
    """Receives, decodes and checks the body.

    From here on, the handler's task is cancelled when the client disconnects.

    Raises ApiError 413 if the body is too large, 408 if it arrives too slowly, and 400 with `param`
    if its content is wrong.
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


def watch_disconnect(request: Request, call: HttpCall) -> None:
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
    raw: bytes | bytearray, body_type: type[Body], config: ServerConfig, call: HttpCall
) -> Body:
    """Decodes JSON into a Struct. Unknown fields are noted or rejected."""
    body, unknown = decode(raw, body_type, find_unknown=config.unknown_params != "allow")
    _refuse_media(raw, unknown)
    note_unknown(unknown, config, call)
    return body


def _refuse_media(raw: bytes | bytearray, unknown: Iterable[str]) -> None:
    names = [name for name in unknown if name.rpartition(".")[2] in MEDIA]
    sent = msgspec.json.decode(raw) if names else {}
    for name in names:
        if name not in sent or sent[name]:  # empty ones say nothing
            raise unsupported(
                name,
                f"'{name}' is not read here: images stand in the messages of a chat, if the model "
                f"reads them.",
            )


def note_unknown(names: Iterable[str], config: ServerConfig, call: HttpCall) -> None:
    """Adds the paths of fields that are unknown or have no effect to the header
    x-unknown-params.
    """
    if config.unknown_params == "allow" or not (unknown := sorted(names)):
        return
    if config.unknown_params == "error":
        raise invalid(unknown[0], f"Unknown parameter: '{unknown[0]}'.", "unknown_parameter")
    call.unknown_params += unknown
