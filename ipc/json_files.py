"""Reads the small JSON files of a model's directory, which anybody may have written.

Must not know: what any of them means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ModelLoadError

MAX_BYTES = 128 * 2**20  # an index of a hundred thousand tensors has 10 MB
MAX_NESTING = 64
LFS_POINTER, MAX_POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a regular file. Integers beyond 64 bits become floats.

    Raises ModelLoadError naming the file when it is missing, not a regular file (a pipe would
    block), unreadable, too large, nested too deeply or not an object.
    """
    return _read(path, dict)


def read_json_list(path: Path) -> list[Any]:
    """As `read_json`, for a file that holds a list."""
    return _read(path, list)


def _read(path: Path, kind: type) -> Any:
    check_model_file(path)
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelLoadError(f"{path} has {size:,} bytes, the most is {MAX_BYTES:,}")
        value = json.loads(path.read_text(encoding="utf-8"), parse_int=_integer)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    except RecursionError:
        raise ModelLoadError(f"{path} is nested too deeply") from None
    if not isinstance(value, kind):
        wanted = "object" if kind is dict else "list"
        raise ModelLoadError(f"{path} must hold a JSON {wanted}, not a {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise ModelLoadError(f"{path} is nested too deeply")


def read_json_if_exists(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def check_regular_file(path: Path) -> None:
    """Raises ModelLoadError for a file that is missing or not regular (opening a pipe would block),
    and for the pointer that Git leaves in place of a file where its extension LFS is missing.
    """
    try:
        is_regular, exists = path.is_file(), path.exists()
        is_pointer = is_regular and path.stat().st_size < MAX_POINTER_BYTES and _is_pointer(path)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not exists:
        raise ModelLoadError(f"{path.parent} has no {path.name}")
    if not is_regular:
        raise ModelLoadError(f"{path} is not a regular file")
    if is_pointer:
        raise ModelLoadError(
            f"{path} is a pointer of Git LFS in the place of the file; get the files with: "
            f"git -C {path.parent} lfs pull"
        )


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def check_model_file(path: Path, directory: Path | None = None) -> None:
    """Raises ModelLoadError also for a link that leads out of the model's directory (default: the
    file's), unless into the hub's cache: a model must not name other files of this machine.
    """
    check_regular_file(path)
    if not path.is_symlink() and directory is None:
        return
    own, target = (directory or path.parent).resolve(), path.resolve()
    folder = target.parent  # the hub's cache: models--owner--name/blobs/DIGEST
    is_cached = folder.name == "blobs" and folder.parent.name.startswith("models--")
    if not is_cached and not target.is_relative_to(own):
        raise ModelLoadError(
            f"{path} is a link out of the model's directory, to {target}; copy the file instead"
        )


def _integer(text: str) -> int | float:
    number = int(text) if len(text) < 30 else None  # longer ones take quadratic time
    return number if number is not None and -(2**63) <= number < 2**64 else float(text)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
