"""GrammarQueue: says whose grammar is checked next.

Must not know: grammars, processes, threads beyond its lock, requests.

    owner a  g1 g2 g3 …  ┐                          ┌─▶ a worker for any owner
    owner b  g4          ├─▶ the owner whose checks ─┤
    owner c  g5 g6       ┘   have taken least time   └─▶ one that owners of slow grammars never get

An owner is slow while its checks have lately taken more than an allowance of CPU time, which fills
up again as time passes. All slow owners together leave one worker to the others, so the first
grammar of another owner waits for no slow one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

ALLOWANCE_S = 0.5  # of CPU time; a usual check takes milliseconds, and at most 1.5 s
ALLOWANCE_PER_S = 0.05  # by which it fills up
MAX_OWNERS = 1024  # of those without a grammar here, whose time is remembered


@dataclass(slots=True, eq=False)
class _Owner:
    checked_s: float  # CPU time of its checks; only differences have a meaning
    updated: float
    spent_s: float = 0.0  # of the allowance, at the time `updated`
    waiting: dict[bytes, None] = field(default_factory=dict)  # in order of arrival


class GrammarQueue:
    """Thread-safe. A grammar may wait for several owners, and its first turn counts."""

    def __init__(self, num_workers: int, clock: Callable[[], float] = time.monotonic):
        self._num_workers = num_workers
        self._clock = clock
        self._owners: dict[Hashable, _Owner] = {}  # the least recently used first
        self._last_checked_s = 0.0
        self._num_slow = 0  # checks of slow owners that run
        self._lock = threading.Lock()

    def add(self, owner: Hashable, grammar: bytes) -> None:
        """The grammar waits, unless it does already for this owner."""
        with self._lock:
            account = self._owners.pop(owner, None) or _Owner(self._last_checked_s, self._clock())
            self._owners[owner] = account
            if not account.waiting:  # an owner that was away has no credit
                account.checked_s = max(account.checked_s, self._last_checked_s)
            account.waiting[grammar] = None
            if len(self._owners) > MAX_OWNERS:
                idle = next((one for one in self._owners if not self._owners[one].waiting), owner)
                if idle != owner:
                    del self._owners[idle]

    def take(self) -> tuple[Hashable, bytes, bool] | None:
        """Removes the next grammar: its owner, itself, and whether the owner is slow, for `done`.
        None: no more may be checked now; a worker asks again after `done`.
        """
        with self._lock:
            now, best = self._clock(), None
            may_be_slow = self._num_slow < max(1, self._num_workers - 1)
            for owner, account in self._owners.items():
                if account.waiting and (may_be_slow or not self._is_slow(account, now)):
                    if best is None or account.checked_s < self._owners[best].checked_s:
                        best = owner
            if best is None:
                return None
            account = self._owners[best]
            grammar = next(iter(account.waiting))
            del account.waiting[grammar]
            self._last_checked_s = account.checked_s
            is_slow = self._is_slow(account, now)
            self._num_slow += is_slow
            return best, grammar, is_slow

    def done(self, owner: Hashable, seconds: float, was_slow: bool) -> None:
        """The check of a grammar that `take` returned has taken this CPU time."""
        with self._lock:
            self._num_slow -= was_slow
            if (account := self._owners.get(owner)) is not None:
                account.checked_s += seconds
                self._is_slow(account, self._clock())
                account.spent_s += seconds

    @staticmethod
    def _is_slow(account: _Owner, now: float) -> bool:
        account.spent_s = max(0.0, account.spent_s - ALLOWANCE_PER_S * (now - account.updated))
        account.updated = now
        return account.spent_s > ALLOWANCE_S
