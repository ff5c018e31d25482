"""Reports to systemd that a service is ready, and that it works (sd_notify).

Must not know: what the service does.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time


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

    def ready(self) -> None:
        self._send(b"READY=1")

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
