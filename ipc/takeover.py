"""Takes an address over from the daemon that listens there.

Must not know: what a daemon serves, how it listens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import QuireError
from .listener import listener_pid

CLOSE_TIMEOUT_S = 10.0  # its input thread closes the listener at once


@contextlib.contextmanager
def taken_over(path: Path) -> Iterator[None]:
    """Inside, the daemon that listened at this socket file listens no more; bind the address there.
    It ends with the context, in the middle of its requests, which its clients submit to the
    daemon that they then find.

    Raises QuireError if it cannot be asked. Does nothing if none listens.
    """
    if (pid := listener_pid(path)) is None:
        yield
        return
    if pid == 0:
        raise QuireError(f"the engine that listens at {path} cannot be seen (another container?)")
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        # 0: the kernel tells no pid, because the listener's queue is full
        while listener_pid(path) in (pid, 0):
            if time.monotonic() > deadline:
                raise QuireError(f"the engine at {path} (pid {pid}) does not stop listening")
            time.sleep(0.005)
        yield
        with contextlib.suppress(ProcessLookupError):  # it had no requests
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    finally:
        os.close(pidfd)
