"""RestartBudget decides how often, and how soon, a dead engine may be started again.

Must not know: engines, requests, who waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

PERIOD_S = 600.0
# These precede the first restart, the second in a row without progress, and so on.
DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0)


class RestartBudget:
    """It allows at most `max_restarts` restarts in any PERIOD_S seconds, and as many starts that
    fail in a row, which may take longer. Restarts between which nothing was computed are delayed
    more and more.
    """

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic):
        self.max_restarts = max_restarts
        self._clock = clock
        self._spent: deque[float] = deque()  # when, of those within the period
        self._num_in_vain = 0  # restarts since the engine last made progress

    def take(self, *, is_free: bool = False, num_failed: int = 0) -> float | None:
        """Returns the seconds to wait before the restart that this call counts, or None if it is
        not allowed.

        is_free: the death told more about which request causes it. Such a restart is always
        allowed, because the number of them is bounded, and not counted. num_failed: starts that
        have failed since the engine died.
        """
        if num_failed >= self.max_restarts:
            return None
        now = self._clock()
        if not is_free:
            while self._spent and now - self._spent[0] >= PERIOD_S:
                self._spent.popleft()
            if len(self._spent) >= self.max_restarts:
                return None
            self._spent.append(now)
        delay_s = DELAYS_S[min(self._num_in_vain, len(DELAYS_S) - 1)]
        self._num_in_vain += not is_free
        return delay_s

    def note_progress(self) -> None:
        """Notes that the engine has computed a token since it was started."""
        self._num_in_vain = 0
