"""A simulated machine: a clock, an event loop that runs by it, and when engines die.

Everything that happens follows from the seed: the same seed gives the same events.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Coroutine
from typing import Any

BEGIN_S, END_S = 1000.0, 5000.0  # of the clock; a run that is longer hangs


class StuckError(AssertionError):
    """Nothing will ever happen, or not within the time."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without files: instead of waiting it moves the world's clock."""

    def __init__(self, world: World):
        super().__init__()
        self._world = world
        self._selector: Any = self  # BaseEventLoop calls its `select`

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> list:
        if timeout is None:
            raise StuckError("nothing will happen any more")
        self._world.now += timeout
        if self._world.now > END_S:
            raise StuckError("it takes too long")
        return []

    def _write_to_self(self) -> None:
        """It never waits, so nothing has to wake it up."""

    def _process_events(self, events: list) -> None:
        pass


class World:
    def __init__(self, seed: int, *, is_printing: bool = False):
        self.rng = random.Random(seed)
        self.now = BEGIN_S
        self.loop = VirtualLoop(self)
        self.events: list[str] = []
        self.deaths: list[Death] = []
        self.received: dict[str, list[int]] = {}  # tokens that clients took, by request
        self.num_kills = self.rng.choice([0, 1, 1, 2, 3, 6])  # from outside, still to come
        self.num_engines = 0
        self._is_printing = is_printing
        self._countdown = self._next_countdown()

    def monotonic(self) -> float:
        return self.now

    def log(self, event: str) -> None:
        self.events.append(f"{self.now - BEGIN_S:.6f} {event}")
        if self._is_printing:
            print(self.events[-1])

    def later(self, delay_s: float, function: Callable[..., object], *args: Any) -> asyncio.Handle:
        return self.loop.call_at(self.now + delay_s, function, *args)

    def run(self, coroutine: Coroutine) -> Any:
        return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Ends what is left: tasks that read outputs, timers."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    def _next_countdown(self) -> int:
        return self.rng.randint(1, self.rng.choice([3, 30, 300]))

    def kills_now(self) -> bool:
        """Called at everything that happens in or to an engine: whether it is killed here."""
        if not self.num_kills:
            return False
        self._countdown -= 1
        if self._countdown:
            return False
        self.num_kills -= 1
        self._countdown = self._next_countdown()
        return True


class Death:
    """An engine that ended, and the requests that were sent to it."""

    def __init__(self, number: signal.Signals, request_ids: set[str]):
        self.number, self.request_ids = number, request_ids
