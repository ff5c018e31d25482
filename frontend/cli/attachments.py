"""Images that a conversation in the terminal takes: read from files, and found in what a terminal
pastes when a file is dragged into it.

Must not know: engines, commands, how an image is decoded.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from ...ipc.errors import InvalidParameterError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
# A word as terminals paste a path: in quotes, or with a backslash before what a shell reads.
WORD = re.compile(r"""\s*(?:'([^']+)'|"([^"]+)"|((?:\\.|[^\s\\'"])+))(?:\s+|$)""")


class Attachment(NamedTuple):
    """An image for the next message."""

    name: str  # of the file
    size: tuple[int, int]  # width and height in pixels
    part: dict[str, Any]  # of a message, in OpenAI's form


def read_image(path: Path, parameter: str) -> Attachment:
    """Raises InvalidParameterError that names `parameter` for a file that is no image."""
    from ..images.media import MAX_BYTES
    from ..images.pictures import EncodedPicture

    try:
        is_file = path.is_file()
        if is_file and path.stat().st_size > MAX_BYTES:
            problem = f"{path} has more than {MAX_BYTES:,} bytes"
            raise InvalidParameterError(parameter, problem)
        data = path.read_bytes() if is_file else b""
    except OSError as error:
        raise InvalidParameterError(parameter, f"cannot read {path}: {error.strerror}") from None
    if not is_file:
        raise InvalidParameterError(parameter, f"{path} is not a file")
    size = EncodedPicture(data, parameter).decode().size
    url = f"data:image;base64,{base64.b64encode(data).decode()}"
    return Attachment(path.name, size, {"type": "image_url", "image_url": {"url": url}})


def leading_images(line: str) -> tuple[list[Path], str]:
    """Returns the image files that a line begins with, by absolute paths or file URLs, and the rest
    of the line.
    """
    paths: list[Path] = []
    while match := WORD.match(line):
        path = _path_of(match)
        if path is None:
            break
        paths.append(path)
        line = line[match.end() :]
    return paths, line.strip()


def _path_of(match: re.Match[str]) -> Path | None:
    """Returns the path that a word is, if it is that of an image file."""
    word = match[1] or match[2] or re.sub(r"\\(.)", r"\1", match[3])
    if word.startswith("file://"):
        word = unquote(word.removeprefix("file://").removeprefix("localhost"))
    if not os.path.isabs(word) or not word.lower().endswith(SUFFIXES):
        return None
    try:
        return Path(word) if os.path.isfile(word) else None
    except ValueError:  # a null byte
        return None


def notice(attachment: Attachment, show: Callable[[str], None]) -> None:
    width, height = attachment.size
    show(f"({attachment.name}, {width} x {height} pixels, goes with the next message)")
