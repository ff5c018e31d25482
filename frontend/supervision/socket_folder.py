"""SocketFolder is a temporary folder for the sockets of a group of processes.

Must not know: what the sockets serve.

The process that makes a folder holds a lock on a file in it. A folder whose lock is free was left
by a process that was killed; the next one with the same prefix removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from ...ipc.errors import InvalidParameterError
from ...ipc.sockets import MAX_PATH_BYTES

LOCK = "lock"


class SocketFolder:
    """`path` is the folder, for sockets with names of at most the length of `longest_name`.

    Raises InvalidParameterError if a path in it would be too long for a socket.
    """

    def __init__(self, prefix: str, longest_name: str):
        parent = tempfile.gettempdir()
        _remove_abandoned(Path(parent), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        length = len(os.fsencode(parent))
        if (surplus := len(os.fsencode(self.path / longest_name)) - MAX_PATH_BYTES) > 0:
            self.path.rmdir()
            raise InvalidParameterError(
                "TMPDIR",
                f"sockets are made there, so its path may have at most {length - surplus} bytes, "
                f"{parent!r} has {length}",
            )
        # the file gets its name when it is locked: others must not see it free
        draft = self.path / f"{LOCK}.new"
        self._fd = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        draft.rename(self.path / LOCK)

    def remove(self) -> None:
        """Removes the folder and what is in it. Call it once."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.path)
        os.close(self._fd)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes this user's folders whose makers have ended."""
    for file in parent.glob(f"{prefix}*/{LOCK}"):
        with contextlib.suppress(OSError):  # it is in use, or another process removes it
            if file.parent.lstat().st_uid != os.geteuid():
                continue
            fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(file.parent)
            finally:
                os.close(fd)
