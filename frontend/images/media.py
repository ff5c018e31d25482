"""Opens the images of a request: bytes, paths, URLs, PIL images and arrays.

Must not know: how an image is decoded, models, tokens. A string always comes from outside: it may
name what the operator allows and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ...ipc.checks import require, shown
from ...ipc.config import MultiModalConfig
from ...ipc.errors import InvalidParameterError
from .pictures import DecodedPicture, EncodedPicture, Picture
from .web import Web

MAX_BYTES = 32 * 2**20  # of the file of an image
MAX_TOTAL_BYTES = 64 * 2**20  # of the files of all images of a prompt
DATA_URL = "data:"


class ImageSource(NamedTuple):
    """An image as a request gives it."""

    value: Any
    parameter: str  # by which errors name it, such as "messages[0].content[1].image_url"

    @property
    def needs_network(self) -> bool:
        """Whether opening it may wait for a server."""
        return isinstance(self.value, str) and self.value[:8].lower().startswith(
            ("http:", "https:")
        )


class Media:
    """`web` takes the place of the network in tests. Raises InvalidParameterError for settings."""

    def __init__(self, config: MultiModalConfig, web: Web | None = None):
        self._web = web or Web(config.allowed_media_domains)
        self._directory = config.allowed_local_media_path
        if self._directory and not os.path.isdir(self._directory):
            raise InvalidParameterError(
                "allowed_local_media_path", f"must be a directory, got {shown(self._directory)}"
            )

    def open_all(self, sources: list[ImageSource]) -> list[Picture]:
        """Blocks while images are fetched. Raises InvalidParameterError."""
        pictures, remaining = [], MAX_TOTAL_BYTES
        for source in sources:
            picture, num_bytes = self._open(source, remaining)
            pictures.append(picture)
            remaining -= num_bytes
        return pictures

    def _open(self, source: ImageSource, remaining: int) -> tuple[Picture, int]:
        """The picture, and the size of its file in bytes. `remaining`: of the prompt."""
        value, parameter = source
        most = min(MAX_BYTES, remaining)
        if isinstance(value, str):
            data = self._read_url(value, parameter, most)
        elif isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
        elif isinstance(value, PathLike):
            data = _read_file(Path(value), parameter, most)
        else:
            return DecodedPicture(value, parameter), 0
        _check_bytes(len(data), parameter, most)
        return EncodedPicture(data, parameter), len(data)

    def _read_url(self, url: str, parameter: str, most: int) -> bytes:
        scheme = url[: url.find(":") + 1].lower()
        if scheme == DATA_URL:
            return read_data_url(url, parameter, most)
        if scheme in ("http:", "https:"):
            return self._web.fetch(url, parameter, most)
        if scheme == "file:":
            return self._read_allowed(url, parameter, most)
        problem = "must be a URL that begins with data:, http:, https: or file:, got"
        raise InvalidParameterError(parameter, f"{problem} {shown(url)}")

    def _read_allowed(self, url: str, parameter: str, most: int) -> bytes:
        """Requires that the file, all links followed, lies under allowed_local_media_path."""
        allowed = self._directory
        problem = "names a local file; the engine runs without allowed_local_media_path"
        require(allowed, parameter, problem)
        try:
            parts = urlsplit(url)
            path = os.path.realpath(unquote(parts.path))
        except ValueError as error:  # such as an embedded null byte
            raise InvalidParameterError(parameter, f"is no URL: {error!s:.100}") from error
        require(parts.netloc in ("", "localhost"), parameter, "must name a file of this machine")
        require(
            Path(path).is_relative_to(os.path.realpath(allowed)),
            parameter,
            f"must name a file under allowed_local_media_path={allowed}",
        )
        return _read_file(Path(path), parameter, most)


def read_data_url(url: str, parameter: str, most: int = MAX_BYTES) -> bytes:
    """The contents of a data URL in base64. Raises InvalidParameterError."""
    head, comma, text = url.partition(",")
    is_base64 = comma and head.lower().endswith(";base64")
    require(is_base64, parameter, "must be a data URL in base64: data:image/png;base64,…")
    return read_base64(text, parameter, most)


def read_base64(text: str, parameter: str, most: int = MAX_BYTES) -> bytes:
    """The contents of base64. Spaces and line ends are ignored. Raises InvalidParameterError."""
    _check_bytes(len(text) // 4 * 3 - 2, parameter, most)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameterError(parameter, f"is not base64: {error!s:.100}") from error


def _check_bytes(num_bytes: int, parameter: str, most: int) -> None:
    if num_bytes <= most:
        return
    problem = f"is a file of {num_bytes:,} bytes; an image can have {MAX_BYTES:,}"
    if most < MAX_BYTES:
        problem += f", and all images of a prompt {MAX_TOTAL_BYTES:,}"
    raise InvalidParameterError(parameter, problem)


def _read_file(path: Path, parameter: str, most: int) -> bytes:
    """Requires a regular file: a device or a pipe may never end."""
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            status = os.fstat(file.fileno())
            require(stat.S_ISREG(status.st_mode), parameter, f"{path} is not a regular file")
            _check_bytes(status.st_size, parameter, most)
            return file.read(most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidParameterError):  # which is a ValueError
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidParameterError(parameter, f"{path} cannot be read: {reason}") from error
