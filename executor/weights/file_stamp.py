"""A stamp of files, which tells whether they have changed since they were read.

Must not know: what the files hold.
"""

from __future__ import annotations

import os
from pathlib import Path


def stamp_of(path: str) -> str:
    """The names, sizes, inodes and times of change of a file, or of the files in a directory; "" of
    what is not there.
    """
    place = Path(path)
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return ";".join(
        f"{file.name}:{status.st_size}:{status.st_ino}:{status.st_mtime_ns}"
        for file in files
        if (status := _status(file)) is not None
    )


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:  # it has just been removed
        return None
