"""The files of Unix sockets: who may replace one, and who may remove it.

Must not know: what a socket serves.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import QuireError
from .operating_system import SYSTEM


class SocketFile:
    """The file of a socket that this process has just bound.

    Its number is not given to another file meanwhile, also when the socket has been closed.
    """

    def __init__(self, path: Path):
        self.path = path.absolute()
        self._fd = SYSTEM.hold(self.path)
        # of the file that is held, whatever the path names by now
        self._status = self.path.lstat() if self._fd is None else os.fstat(self._fd)

    def remove(self) -> None:
        """Removes the file, unless the path has become that of another process, such as a
        successor. Call it once.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.lstat(), self._status):
                self.path.unlink()
        if self._fd is not None:
            os.close(self._fd)


@contextlib.contextmanager
def directory_lock(path: Path, timeout_s: float = 5.0) -> Iterator[None]:
    """Held while a dead listener's file in this directory is replaced: two processes that start at
    the same time must not both take the address.

    Raises QuireError if another process holds it for long, OSError if there is no such directory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise QuireError(f"{path} is locked by another process") from error
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)
