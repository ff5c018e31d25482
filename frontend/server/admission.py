"""Admission: which requests the engine holds, and which wait for it here, fairly and within bounds.

Must not know: HTTP beyond its refusals, the engine, what a request asks for.

    slot() ──room, and nobody waits──▶ in the engine ──▶ leave
       └─────────▶ waits: one line per key, in order of priority and arrival; the lines take turns ─▶ in the engine
       └─────────▶ ApiError 429, where the queue is full

What a request weighs is its number of completions. The one whose turn it is is never overtaken,
however much it weighs, so nobody starves; one that weighs more than there is goes in alone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Hashable

from .http.errors import ApiError

MAX_RETRY_AFTER_S = 600.0


class DrainRate:
    """Requests and prompt tokens that the engine has done with, per second.

    Counted over the last WINDOW_S, or the time since there has been a queue if that is shorter:
    before, the engine was not busy, and its pace told nothing of what it can do. One more than were
    counted, in one second more, so that the first moments of a queue give a number too: it comes
    out too high for an engine that finishes less than one request in a second, until it has been
    watched for some seconds.
    """

    WINDOW_S = 30.0
    MAX_COUNTED = 512

    def __init__(self) -> None:
        # (when, prompt tokens)
        self._finished: deque[tuple[float, int]] = deque(maxlen=self.MAX_COUNTED)

    def add(self, now: float, num_tokens: int) -> None:
        self._finished.append((now, num_tokens))

    def per_second(self, now: float, busy_since: float) -> tuple[float, float]:
        """(requests, prompt tokens)."""
        since = max(now - self.WINDOW_S, busy_since)
        if len(self._finished) == self.MAX_COUNTED:
            since = max(since, self._finished[0][0])
        counted = [num_tokens for moment, num_tokens in self._finished if moment >= since]
        span_s = now - since + 1.0
        mean_tokens = max(1.0, sum(counted) / len(counted)) if counted else 1.0
        return (len(counted) + 1) / span_s, (sum(counted) + mean_tokens) / span_s


class Slot:
    """One request's place: an async context manager.

    Inside it the engine may have the request; `queued_s` says how long it waited.
    """

    __slots__ = (
        "_admission",
        "group",
        "is_waiting",
        "key",
        "num_completions",
        "num_tokens",
        "priority",
        "queued_s",
        "waiter",
    )

    def __init__(
        self,
        admission: Admission,
        key: str,
        group: Hashable,
        num_completions: int,
        num_tokens: int,
        priority: int,
    ):
        self._admission = admission
        self.key = key
        self.group = group
        self.priority = priority
        self.waiter: asyncio.Future | None = None
        self.is_waiting = False  # in a line
        self.num_completions = num_completions
        self.num_tokens = num_tokens
        self.queued_s = 0.0

    async def __aenter__(self) -> Slot:
        admission = self._admission
        if admission.num_waiting or not admission.has_room(self):
            await admission.wait(self)
        else:
            admission.num_running += self.num_completions
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._admission.leave(self)


class Admission:
    """max_running: completions in the engine. max_waiting: groups of requests (those of one call
    are a group); max_waiting_tokens: of all prompts that wait. `clock` gives seconds.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        max_waiting_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.num_running = 0  # completions in the engine
        self.num_waiting = 0  # requests
        self.num_waiting_tokens = 0
        self.num_refused: Counter[str] = Counter()  # by the bound that was reached
        self._clock = clock
        # by key, none of them empty; the first is the next to be served
        self._lines: dict[str, list[tuple[int, int, Slot]]] = {}
        self._groups: Counter[Hashable] = Counter()  # requests that wait
        self._arrivals = itertools.count()
        self._busy_since = 0.0  # since when somebody has been waiting
        self._drain_rate = DrainRate()

    @property
    def num_waiting_groups(self) -> int:
        return len(self._groups)

    def slot(
        self,
        key: str,
        group: Hashable,
        num_completions: int = 1,
        num_tokens: int = 0,
        priority: int = 0,
    ) -> Slot:
        """Entering it raises ApiError 429 where the queue is full."""
        return Slot(self, key, group, num_completions, num_tokens, priority)

    def has_room(self, slot: Slot) -> bool:
        return self.num_running + slot.num_completions <= self.max_running or not self.num_running

    async def wait(self, slot: Slot) -> None:
        """Returns when it has been let in, and counted among the running."""
        self._check_bounds(slot)
        began = self._clock()
        if not self.num_waiting:
            self._busy_since = began
        slot.waiter = asyncio.get_running_loop().create_future()
        entry = (slot.priority, next(self._arrivals), slot)
        insort(self._lines.setdefault(slot.key, []), entry)
        slot.is_waiting = True
        self.num_waiting += 1
        self.num_waiting_tokens += slot.num_tokens
        self._groups[slot.group] += 1
        try:
            await slot.waiter
        except asyncio.CancelledError:
            if slot.is_waiting:
                self._take(slot.key, bisect_left(self._lines[slot.key], entry))
            elif not slot.waiter.cancelled():  # let in and cancelled in the same moment
                self.num_running -= slot.num_completions
            self._let_in()  # it may have been in others' way
            raise
        slot.queued_s = self._clock() - began

    def leave(self, slot: Slot) -> None:
        """The engine is done with it."""
        self.num_running -= slot.num_completions
        self._drain_rate.add(self._clock(), slot.num_tokens)
        if self.num_waiting:
            self._let_in()

    def _take(self, key: str, index: int) -> Slot:
        """Out of its line."""
        line = self._lines[key]
        slot = line.pop(index)[-1]
        slot.is_waiting = False
        if not line:
            del self._lines[key]
        self.num_waiting -= 1
        self.num_waiting_tokens -= slot.num_tokens
        self._groups[slot.group] -= 1
        if not self._groups[slot.group]:
            del self._groups[slot.group]
        return slot

    def _let_in(self) -> None:
        """The first of the line whose turn it is, as long as there is room; its line then goes
        behind the others.
        """
        while self._lines:
            key = next(iter(self._lines))
            if not self.has_room(self._lines[key][0][-1]):
                return
            slot = self._take(key, 0)
            if (line := self._lines.pop(key, None)) is not None:
                self._lines[key] = line
            if not slot.waiter.done():  # else it is being cancelled
                self.num_running += slot.num_completions
                slot.waiter.set_result(None)

    # ------------------------------------------------------------ refusals

    def _check_bounds(self, slot: Slot) -> None:
        if slot.group not in self._groups and len(self._groups) >= self.max_waiting:
            raise self._refusal(
                "requests",
                f"{len(self._groups)} requests wait for the engine already, as many as may",
            )
        if self.num_waiting_tokens + slot.num_tokens > self.max_waiting_tokens:
            raise self._refusal(
                "tokens",
                f"{self.num_waiting_tokens} prompt tokens wait for the engine already, and at most "
                f"{self.max_waiting_tokens} may",
            )

    def _refusal(self, bound: str, why: str) -> ApiError:
        self.num_refused[bound] += 1
        retry_after_s = self.expected_wait_s(bound)
        return ApiError(
            429,
            f"{why}. Try again in {max(1, round(retry_after_s))} s.",
            code="rate_limit_exceeded",
            retry_after_s=retry_after_s,
        )

    def expected_wait_s(self, bound: str = "requests") -> float:
        """How long all that waits now takes to be let in, at the pace of late: by then there is
        room for sure, if nobody else comes.
        """
        now = self._clock()
        requests_per_s, tokens_per_s = self._drain_rate.per_second(
            now, self._busy_since if self.num_waiting else now
        )
        wait_s = (
            self.num_waiting / requests_per_s
            if bound == "requests"
            else self.num_waiting_tokens / tokens_per_s
        )
        return min(MAX_RETRY_AFTER_S, max(1.0, wait_s))
