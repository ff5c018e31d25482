"""Files that Quire writes and reads again itself: caches and stores, not models and not settings.

Must not know: what a file holds, torch.

What lies at the path of such a file may be anybody's: a link, a pipe that never ends, a file that
another user has put there or may change. None of that is read. A file counts if it is a regular one
of this user that no other may write; who reads it also checks what it says about itself. Otherwise
it is as if it were not there, and is written again.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".writing"  # the end of the names of files that are not whole yet
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_cache() -> Path:
    """Quire's folder for what can be made again, which may not exist yet: $XDG_CACHE_HOME/quire, or
    ~/.cache/quire.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire"


def user_state() -> Path:
    """Quire's folder for what is kept between runs, which may not exist yet: $XDG_STATE_HOME/quire,
    or ~/.local/state/quire.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "quire"


class UntrustedFileError(OSError):
    """What lies at a path may be another's; the text says why."""


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor, without waiting for whatever it is. With os.O_CREAT the file gets mode 0600.

    Raises FileNotFoundError, UntrustedFileError, OSError.
    """
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | safe, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise UntrustedFileError(f"{path} is a link") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedFileError(f"{path} is not a regular file")
        if status.st_uid != os.geteuid():
            raise UntrustedFileError(f"{path} belongs to user {status.st_uid}")
        if status.st_mode & _OTHERS_MAY_WRITE:
            mode = stat.S_IMODE(status.st_mode)
            raise UntrustedFileError(f"{path} may be written by other users (mode {mode:04o})")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path, most: int) -> bytes:
    """All of a file of at most `most` bytes. Raises as open_own, and OSError for a larger one."""
    with open(open_own(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(f"{path} has {size} bytes, the most is {most}")
        return file.read(most)


def replace_own(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Puts a file with what `write` writes in the place of whatever is there. Readers see all of it
    or nothing, also after a crash. Raises OSError, and then leaves nothing.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    import tempfile  # most processes read such files and write none

    descriptor, name = tempfile.mkstemp(TEMPORARY, path.name, path.parent)
    try:
        with open(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # before the rename, so that no crash leaves a hole
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
