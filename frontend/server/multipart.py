"""Receives a file that a form sends (multipart/form-data), piece by piece.

Must not know: where the file is kept, what the fields mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from .config import ServerConfig
from .http.errors import ApiError, invalid

MAX_FIELD_BYTES = 4096  # of a field other than the file, and of the headers of a part
MAX_PARTS = 16


async def receive_form(
    request: Request, config: ServerConfig, most: int, write: Callable[[bytes], None]
) -> dict[str, str]:
    """Passes the pieces of the field `file`, of at most `most` bytes, to `write`. Returns the other
    fields, and the file's name as `filename`.

    Raises ApiError 415, 413, 408 and 400, and what `write` raises.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        message = "The body must be a form: multipart/form-data with the fields file and purpose."
        raise ApiError(415, message, code="unsupported_media_type")
    form = _Form(most, write)
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())
        while True:
            async with asyncio.timeout(config.body_timeout_s):  # for each piece
                message = await request.receive()
            if message["type"] == "http.disconnect":
                problem = "The client left before its request was complete."
                raise ApiError(400, problem, code="client_disconnected")
            parser.write(message.get("body", b""))
            if not message.get("more_body"):
                break
        if not form.has_ended:  # which the parser's finalize() does not check
            raise FormParserError("its end is missing")
    except FormParserError as error:
        raise ApiError(400, f"The form is malformed: {error}.", code="invalid_form") from None
    except TimeoutError:
        problem = f"Nothing of the body has arrived for {config.body_timeout_s:g} s."
        raise ApiError(408, problem, code="request_timeout") from None
    return form.decoded()


class _Form:
    """What the parser has found. Its callbacks receive a buffer, a start and an end."""

    def __init__(self, most: int, write: Callable[[bytes], None]):
        self.has_ended = False
        self._most = most
        self._write = write
        self._num_bytes = 0  # of the file
        self._num_parts = 0
        self._name = ""
        self._header, self._value = bytearray(), bytearray()
        self._fields: dict[str, bytearray] = {}

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._grow(self._header, data[start:end]),
            "on_header_value": lambda data, start, end: self._grow(self._value, data[start:end]),
            "on_header_end": self._end_header,
            "on_end": self._end,
            "on_part_data": lambda data, start, end: self._take(data[start:end]),
        }

    def decoded(self) -> dict[str, str]:
        try:
            return {name: value.decode() for name, value in self._fields.items()}
        except UnicodeDecodeError:
            raise ApiError(400, "The form is malformed: a field is not UTF-8.") from None

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(400, f"A form has at most {MAX_PARTS} fields.", code="invalid_form")
        self._name = ""

    @staticmethod
    def _grow(field: bytearray, data: bytes) -> None:
        field += data
        if len(field) > MAX_FIELD_BYTES:
            problem = f"A field of the form has more than {MAX_FIELD_BYTES} bytes."
            raise ApiError(413, problem, code="request_too_large")

    def _end_header(self) -> None:
        name, value = bytes(self._header).lower(), bytes(self._value)
        self._header, self._value = bytearray(), bytearray()
        if name != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self._fields or (self._name == "file" and "filename" in self._fields):
            raise invalid(self._name, f"The form has the field '{self._name:.40}' twice.")
        if self._name == "file":
            self._fields["filename"] = bytearray(options.get(b"filename", b"file"))
        elif self._name:
            self._fields[self._name] = bytearray()

    def _end(self) -> None:
        self.has_ended = True

    def _take(self, data: bytes) -> None:
        if self._name == "file":
            self._num_bytes += len(data)
            if self._num_bytes > self._most:
                problem = f"A file must have at most {self._most} bytes."
                raise ApiError(413, problem, code="request_too_large", param="file")
            self._write(data)
        elif self._name:
            self._grow(self._fields[self._name], data)
