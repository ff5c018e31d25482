"""Watchdog decides when an engine that has work has stopped working.

Must not know: how an engine is asked or ended.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

CHECK_INTERVAL_S = 0.5  # between two calls of `check`
DOUBT_TIMEOUT_S = 2.0  # see Watchdog.doubt


class Step(enum.Enum):
    WAIT = enum.auto()
    ASK = enum.auto()  # for an answer between two steps
    SHOW_STACKS = enum.auto()
    END = enum.auto()


class Watchdog:
    """Call `heard` with everything that shows that a step has ended, and `check` every
    CHECK_INTERVAL_S seconds while the engine has work.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic):
        self.timeout_s = timeout_s
        self._clock = clock
        self._asked_at: float | None = None  # without an answer since
        self._has_shown_stacks = False
        self.is_in_doubt = False

    def heard(self) -> None:
        self._asked_at = None
        self._has_shown_stacks = self.is_in_doubt = False

    def doubt(self) -> None:
        """Notes that messages of the engine may no longer arrive. The engine is asked for one that
        it sends at once, also during a step.
        """
        if not self.is_in_doubt:
            self.is_in_doubt, self._asked_at = True, self._clock()

    def check(self) -> Step:
        """Returns what to do now."""
        now = self._clock()
        if self._asked_at is None:
            self._asked_at = now
            return Step.ASK
        timeout_s = min(self.timeout_s, DOUBT_TIMEOUT_S) if self.is_in_doubt else self.timeout_s
        if now - self._asked_at < timeout_s:
            return Step.WAIT
        if not self._has_shown_stacks:
            self._has_shown_stacks = True
            return Step.SHOW_STACKS
        return Step.END
