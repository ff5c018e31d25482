"""Reports to systemd that a service is ready, and that it works (sd_notify), and receives such
reports from a child.

Must not know: what the service does.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from pathlib import Path

NUM_BLOCKS = "X_QUIRE_NUM_BLOCKS"  # a report of an engine: of its KV cache
REPORTS = 10  # of a child in the time that one of its steps may take, at least


class Notifier:
    """Does nothing unless systemd started this process with Type=notify."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        limit_us = os.environ.get("WATCHDOG_USEC", "")
        is_watched = self._address and limit_us.isdecimal()
        # WatchdogSec; a sign of work comes twice as often
        self._interval_s = int(limit_us) / 2e6 if is_watched else math.inf
        # When the next sign is due, by time.monotonic().
        self.due = time.monotonic() + self._interval_s

    def ready(self, **facts: object) -> None:
        """`facts`: what else is reported; systemd ignores names that begin with X_."""
        lines = ["READY=1", *(f"{name}={value}" for name, value in facts.items())]
        self._send("\n".join(lines).encode())

    def works(self) -> None:
        """Call it between two steps, at the latest when it is `due`."""
        now = time.monotonic()
        if now >= self.due:
            self.due = now + self._interval_s
            self._send(b"WATCHDOG=1")

    def _send(self, message: bytes) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(message, address)


class Notices:
    """What a child reports as it would to systemd, at a socket file of its own.

    `environment` are the variables that make it report. Once it is ready it reports often that it
    works, if there is a `limit_s` for the time of one step. It may take `start_limit_s` to be
    ready.
    """

    def __init__(self, path: Path, limit_s: float | None = None, start_limit_s: float = math.inf):
        self._path = path
        self._start_until = time.monotonic() + start_limit_s
        self._limit_s = math.inf if limit_s is None else limit_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind(str(path))
        except OSError:
            self._socket.close()
            raise
        self.environment = {"NOTIFY_SOCKET": str(path)}
        if self._limit_s < math.inf:
            self.environment["WATCHDOG_USEC"] = str(round(self._limit_s / REPORTS * 1e6))
        self.is_ready = False
        self.facts: dict[str, str] = {}  # what it has reported, by name
        self._heard = math.inf  # by time.monotonic()

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> None:
        while True:
            try:
                message = self._socket.recv(4096)
            except BlockingIOError:
                return
            lines = message.decode(errors="replace").splitlines()
            self.facts |= dict(line.split("=", 1) for line in lines if "=" in line)
            self.is_ready |= "READY" in self.facts
            self._heard = time.monotonic()

    @property
    def late_at(self) -> float:
        """When the child counts as hung, by time.monotonic(); inf if it is not watched."""
        if not self.is_ready:
            return self._start_until
        # a step may begin shortly before a report is due
        limit_s = self._limit_s * (1 + 1 / REPORTS)
        return self._heard + limit_s

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)
