"""Admission: decides which requests the engine holds and which wait here, fairly and within limits.

Must not know: HTTP beyond its errors, the engine, the content of a request.

    Slot ──capacity, and none waits──▶ in the engine ──▶ leave
      └─────────▶ waits: one queue per key, by priority and arrival; round-robin ─▶ in the engine
      └─────────▶ ApiError 429, if the queue is full

The weight of a request is its number of completions. The next request in turn is never overtaken,
whatever its weight, so no request starves. A request that exceeds the total capacity enters alone.

With `reserves_shares`, each key that has requests has an equal share of every limit, which it may
use although others have reached the limit; at worst the limit is exceeded by these shares. The
engine is fair between keys, but can only choose among requests that it has.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from .http.errors import ApiError

if TYPE_CHECKING:
    from .http.call import HttpCall

MAX_RETRY_AFTER_S = 600.0
NUM_THREADS = 2  # for work beside the event loop, of all models
# The threads start on first use.
THREADS = ThreadPoolExecutor(NUM_THREADS, "quire work")
Result = TypeVar("Result")


class CompletionRate:
    """The number of completions per second that the engine finishes while it is full.

    There are two estimates. Once as many completions have ended as the engine holds, the rate is
    their number divided by the time they took. Before that, it is the number of completions that
    the engine computes at once divided by the compute time of one (Little's law), estimated from
    the first completions. Their plain count would be far too low while a first batch still runs.
    """

    MIN_COUNTED = 8  # completions, for an engine that holds fewer
    MAX_KEPT = 512
    # MIN_COUNTED completions without a history are assumed to take this time, which is rather too
    # short than too long.
    FIRST_S = 1.0

    def __init__(self) -> None:
        # An entry says when a request ended, its completions, and its seconds of computation.
        self._ended: deque[tuple[float, int, float]] = deque(maxlen=self.MAX_KEPT)

    def add(self, now: float, num_completions: int, computed_s: float) -> None:
        self._ended.append((now, num_completions, computed_s))

    def per_second(
        self,
        now: float,
        full_since: float,
        num_running: int,
        num_computing: int,
        mean_age_s: float,
    ) -> float:
        """`num_running` is the number of completions in the engine, of which it computes
        `num_computing` at once. `mean_age_s` is the mean time for which those have been computed so
        far.
        """
        needed = max(num_running, self.MIN_COUNTED)
        num_counted, since = 0, full_since
        for when, num_completions, _ in reversed(self._ended):
            if when < full_since:
                break
            if num_counted >= needed:
                since = when
                break
            num_counted += num_completions
        if num_counted >= needed and now > since:
            return num_counted / (now - since)
        return max(1, num_computing) / self._computed_s(needed, mean_age_s)

    def _computed_s(self, num_completions: int, mean_age_s: float) -> float:
        """Returns the mean of the last completions to end, or more, if the running ones have
        already taken longer.
        """
        latest = [
            computed_s
            for *_, computed_s in itertools.islice(reversed(self._ended), num_completions)
        ]
        num_missing = max(0, self.MIN_COUNTED - len(latest))
        mean_s = (sum(latest) + num_missing * self.FIRST_S) / (len(latest) + num_missing)
        return max(mean_s, mean_age_s, 0.001)


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one request: an async context manager, which raises ApiError 429 when it is
    entered and the queue is full.

    Inside it, the request may be in the engine. `key` names its queue. `group` is the call that it
    belongs to.
    """

    admission: Admission
    key: str
    group: Hashable
    num_completions: int = 1
    num_tokens: int = 0
    priority: int = 0
    deadline: float | None = None  # by the admission's clock
    waiter: asyncio.Future | None = None
    is_waiting: bool = False  # in a queue
    queued_s: float = 0.0  # seconds that it waited
    entered: float = 0.0  # by the admission's clock
    # A request is computed for this estimated fraction of its time in the engine; otherwise it
    # waits there.
    share: float = 1.0

    async def __aenter__(self) -> Slot:
        admission = self.admission
        if admission.must_wait(self):
            await admission.wait(self)
        else:
            admission.admit(self)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.admission.leave(self)


class Admission:
    """Limits the completions in the engine and the requests that wait.

    max_running is the limit of completions in the engine, and max_computing that of completions in
    one step of the engine. max_waiting is the limit of groups of waiting requests (the requests of
    one call are a group). max_waiting_tokens is the limit of all waiting prompts, and
    max_waiting_tokens_per_key that of the prompts of one key. `clock` returns seconds.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        max_waiting_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        max_computing: int | None = None,
        max_waiting_tokens_per_key: int | None = None,
        reserves_shares: bool = False,
    ):
        self.max_running = max_running
        self.max_computing = max_computing or max_running
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.max_waiting_tokens_per_key = max_waiting_tokens_per_key
        self.reserves_shares = reserves_shares
        self.num_running = 0  # completions in the engine
        self.num_waiting = 0  # requests
        self.num_waiting_completions = 0
        self.num_waiting_tokens = 0
        self.num_refused: Counter[str] = Counter()  # by the limit that was reached
        self._clock = clock
        # The queues are by key and never empty. The first is the next to be served.
        self._lines: dict[str, list[tuple[int, int, Slot]]] = {}
        self._groups: Counter[Hashable] = Counter()  # waiting requests
        self._running: Counter[str] = Counter()  # completions in the engine, by key
        self._arrivals = itertools.count()
        self._full_since = 0.0  # since when at least one request has been waiting
        self._sum_entered = 0.0  # of all completions in the engine: their times of admission
        self._rate = CompletionRate()
        self.slot = partial(Slot, self)

    def must_wait(self, slot: Slot) -> bool:
        if not self.num_waiting and self.has_room(slot):
            return False
        return slot.key in self._lines or not self._has_share(slot)

    def has_room(self, slot: Slot) -> bool:
        return self.num_running + slot.num_completions <= self.max_running or not self.num_running

    def _has_share(self, slot: Slot) -> bool:
        """Tells whether its key may have it in the engine, whatever the others have."""
        own = self._running[slot.key]
        return self.reserves_shares and (
            not own or own + slot.num_completions <= self.max_running / self._num_keys(slot.key)
        )

    def _num_keys(self, key: str) -> int:
        """Returns the number of keys with requests in the engine or in a queue, `key` included."""
        return len({key, *self._running, *self._lines})

    async def wait(self, slot: Slot) -> None:
        """Returns when the request has been admitted and is counted as running."""
        self._check_bounds(slot)
        began = self._clock()
        if not self.num_waiting:
            self._full_since = began
        slot.waiter = asyncio.get_running_loop().create_future()
        entry = (slot.priority, next(self._arrivals), slot)
        insort(self._lines.setdefault(slot.key, []), entry)
        self._count_waiting(slot, 1)
        self._admit_waiting()  # its priority may make it the first, and it may be light enough
        timeout_s = None if slot.deadline is None else slot.deadline - began
        try:
            async with asyncio.timeout(timeout_s):
                await slot.waiter
        except (asyncio.CancelledError, TimeoutError) as ended:
            if slot.is_waiting:
                self._take(slot.key, bisect_left(self._lines[slot.key], entry))
            elif not slot.waiter.cancelled():  # admitted and cancelled at the same time
                self._stop_counting(slot)
            self._admit_waiting()  # it may have blocked others
            if isinstance(ended, TimeoutError):
                message = "The request's time was over before the engine could begin."
                raise ApiError(504, message, code="timeout") from None
            raise
        slot.queued_s = self._clock() - began

    def admit(self, slot: Slot) -> None:
        slot.entered = self._clock()
        self.num_running += slot.num_completions
        self._running[slot.key] += slot.num_completions
        slot.share = min(1.0, self.max_computing / self.num_running)
        self._sum_entered += slot.num_completions * slot.entered

    def _stop_counting(self, slot: Slot) -> None:
        self.num_running -= slot.num_completions
        self._running[slot.key] -= slot.num_completions
        if not self._running[slot.key]:
            del self._running[slot.key]
        self._sum_entered -= slot.num_completions * slot.entered
        if not self.num_running:
            self._sum_entered = 0.0  # clears the rounding error

    def leave(self, slot: Slot) -> None:
        """Releases the slot when the engine has finished the request."""
        self._stop_counting(slot)
        now = self._clock()
        self._rate.add(now, slot.num_completions, (now - slot.entered) * slot.share)
        if self.num_waiting:
            self._admit_waiting()

    def _take(self, key: str, index: int) -> Slot:
        """Removes a slot from its queue."""
        line = self._lines[key]
        slot = line.pop(index)[-1]
        if not line:
            del self._lines[key]
        self._count_waiting(slot, -1)
        return slot

    def _count_waiting(self, slot: Slot, change: int) -> None:
        """`change` is 1 when the slot enters its queue and -1 when it leaves."""
        slot.is_waiting = change > 0
        self.num_waiting += change
        self.num_waiting_completions += change * slot.num_completions
        self.num_waiting_tokens += change * slot.num_tokens
        self._groups[slot.group] += change
        if not self._groups[slot.group]:
            del self._groups[slot.group]

    def _admit_waiting(self) -> None:
        """Admits the first of the queue whose turn it is, while there is capacity. Its queue then
        moves behind the others.
        """
        while (key := self._next_key()) is not None:
            slot = self._take(key, 0)
            if (line := self._lines.pop(key, None)) is not None:
                self._lines[key] = line
            assert slot.waiter is not None
            if not slot.waiter.done():  # else it is being cancelled
                self.admit(slot)
                slot.waiter.set_result(None)

    def _next_key(self) -> str | None:
        """Returns the first in turn, if there is room for its first request, else one with a share
        left.
        """
        for number, (key, line) in enumerate(self._lines.items()):
            slot = line[0][-1]
            if (not number and self.has_room(slot)) or self._has_share(slot):
                return key
            if not self.reserves_shares:
                return None
        return None

    # ------------------------------------------------------------ rejected requests

    def _check_bounds(self, slot: Slot) -> None:
        mine = [other for *_, other in self._lines.get(slot.key, ())]
        num_tokens = sum(other.num_tokens for other in mine) + slot.num_tokens
        # A key within its share of a limit is not refused.
        share = 1 / self._num_keys(slot.key) if self.reserves_shares else 0.0
        if slot.group not in self._groups and len(self._groups) >= self.max_waiting:
            num_groups = len({other.group for other in mine})
            if num_groups + 1 > self.max_waiting * share:
                raise self._refusal(
                    "requests",
                    f"{len(self._groups)} requests already wait for the engine, the maximum",
                )
        if slot.deadline is not None:
            wait_s, left_s = self.expected_wait_s(), slot.deadline - self._clock()
            if wait_s > left_s:
                raise self._refusal(
                    "deadline",
                    f"the engine is expected to begin after {wait_s:.0f} s, and the request has "
                    f"{max(0.0, left_s):.1f} s left",
                )
        most = self.max_waiting_tokens_per_key
        if most is not None and num_tokens > most:
            raise self._refusal(
                "tokens_per_key",
                f"{num_tokens - slot.num_tokens} prompt tokens of this key wait for the engine "
                f"already, and at most {most} may",
            )
        if (
            self.num_waiting_tokens + slot.num_tokens > self.max_waiting_tokens
            and num_tokens > self.max_waiting_tokens * share
        ):
            raise self._refusal(
                "tokens",
                f"{self.num_waiting_tokens} prompt tokens wait for the engine already, and at most "
                f"{self.max_waiting_tokens} may",
            )

    def _refusal(self, bound: str, why: str) -> ApiError:
        self.num_refused[bound] += 1
        retry_after_s = self.expected_wait_s()
        return ApiError(
            429,
            f"{why}. Try again in {max(1, round(retry_after_s))} s.",
            code="rate_limit_exceeded",
            retry_after_s=retry_after_s,
        )

    def expected_wait_s(self) -> float:
        """Returns the seconds until all waiting requests and one more have been admitted, at the
        current completion rate.
        """
        now = self._clock()
        num_computing = min(self.num_running, self.max_computing)
        mean_age_s = (
            (now - self._sum_entered / self.num_running) * num_computing / self.num_running
            if self.num_running
            else 0.0
        )
        per_second = self._rate.per_second(
            now,
            self._full_since if self.num_waiting else now,
            self.num_running,
            num_computing,
            mean_age_s,
        )
        wait_s = (self.num_waiting_completions + 1) / per_second
        return min(MAX_RETRY_AFTER_S, max(1.0, wait_s))


async def in_turn(turns: Admission, call: HttpCall, work: Callable[[], Result]) -> Result:
    """Returns the result of `work`, run in a thread when it is this key's turn.

    All work that takes long beside the event loop uses it: `asyncio.to_thread` would serve in order
    of arrival, so that the work of one key delays that of another. A thread cannot be stopped: if
    the caller is cancelled, its slot is released when `work` ends.
    """
    slot = turns.slot(call.tenant, id(call))
    await slot.__aenter__()
    try:
        running = asyncio.get_running_loop().run_in_executor(THREADS, work)
    except BaseException:
        turns.leave(slot)
        raise

    def ended(done: asyncio.Future) -> None:
        turns.leave(slot)
        if not done.cancelled():
            done.exception()  # mark the exception as retrieved, also if no task waits

    running.add_done_callback(ended)
    try:
        return await asyncio.shield(running)
    finally:
        del running  # an exception in it would keep this frame, and so itself and the texts, alive
