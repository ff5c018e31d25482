"""The program of an engine that starts before its configuration is known: torch's libraries load
while the engine's own modules are imported.

Must not know: what an engine does.

Run as `python -m quire.core.early_start quire.core.engine_proc ARGUMENTS`; the second name is there
for those who look for engines among the system's processes. Without --connect, the other arguments
and the key come from stdin, when its parent has sockets.
"""

from __future__ import annotations

# Modules that are libraries, or have some, must be imported before: see begin_loading.
import contextlib
import contextvars  # noqa: F401
import csv  # noqa: F401
import hashlib  # noqa: F401
import mmap  # noqa: F401
import os
import queue  # noqa: F401
import secrets  # noqa: F401
import subprocess  # noqa: F401
import sys
import unicodedata  # noqa: F401
import zlib  # noqa: F401

import msgspec  # noqa: F401
import zmq  # noqa: F401

from ..ipc import platform_tuning  # noqa: F401

with contextlib.suppress(ImportError):  # a Python that was built without them
    import bz2  # noqa: F401
    import lzma  # noqa: F401


def begin() -> None:
    from ..executor.torch_libraries import begin_loading

    begin_loading()


def arguments() -> list[str]:
    """engine_proc's arguments. Ends the process if its parent is gone."""
    given = sys.argv[2:]
    if "--connect" in given:
        return given
    from ..ipc.process import LENGTH_BYTES

    stdin = sys.stdin.fileno()
    length = os.read(stdin, LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        os._exit(1)
    others = os.read(stdin, int.from_bytes(length)).decode().split("\0")
    return [*given, *others, "--key-fd", str(stdin)]  # the key follows


if __name__ == "__main__":
    begin()
    from .engine_proc import leave, main

    leave(main(arguments()))
