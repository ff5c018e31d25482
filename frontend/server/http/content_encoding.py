"""Decompresses gzip bodies piece by piece and enforces the size limit.

Must not know: requests, the content of a body.
"""

from __future__ import annotations

import zlib

from .errors import ApiError


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
    """The decoder for the request's content encoding; None if the body is not compressed.

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
