"""Sends requests: arrival times, the concurrency limit, conversations turn by turn, and whether
this client kept up.

Must not know: HTTP, what a request holds, statistics, terminals.

              arrival times (seeded)             at most max_concurrency
    requests ───────────────────────▶ dispatcher ───────────────────────▶ one task per request
                                                     outcomes, in the order of the requests ◀──
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter, process_time
from typing import Any

from .openai_client import Outcome
from .workloads import WorkloadRequest

LAG_INTERVAL_S = 0.05
Send = Callable[[Any, int], Awaitable[Outcome]]  # (prompt or messages, max_tokens)


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Returns arrival times in seconds from the start, with a mean of `rate` per second.

    The intervals are gamma distributed: burstiness 1 is a Poisson process, less makes bursts, more
    is more regular. With an infinite rate all requests arrive at once.
    """
    if rate == float("inf"):
        return [0.0] * num_requests
    rng = random.Random(f"arrivals {seed}")
    return list(
        accumulate(
            rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(num_requests)
        )
    )


@dataclass
class LoadReport:
    """The result of a run. `outcomes` has None for requests that an interruption dropped."""

    outcomes: list[Outcome | None]
    start: float = 0.0  # by perf_counter
    was_interrupted: bool = False
    duration_s: float = 0.0
    peak_concurrency: int = 0
    client_cpu_s: float = 0.0
    # lateness of the event loop, every LAG_INTERVAL_S
    lags: list[float] = field(default_factory=list)
    # how much later requests were sent than they were due and the limit allowed
    send_delays: list[float] = field(default_factory=list)


class LoadRunner:
    """One run.

    `interrupt()` ends it early: requests in progress are dropped, finished ones are kept.
    """

    def __init__(
        self,
        send: Send,
        *,
        as_messages: bool,
        max_concurrency: int | None = None,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    ):
        self._send, self._as_messages, self._on_outcome = send, as_messages, on_outcome
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._num_under_way = 0
        self._dispatcher: asyncio.Task[None] | None = None

    async def run(self, requests: list[WorkloadRequest], times: list[float]) -> LoadReport:
        """Sends request i at times[i], or as soon as the limit allows.

        Returns one outcome per turn, in the order of the requests.
        """
        self._report = report = LoadReport([], start=perf_counter())
        self._turns: list[list[Outcome | None]] = [
            [None] * (1 + len(request.follow_ups)) for request in requests
        ]
        cpu = process_time()
        lag = asyncio.create_task(self._watch_lag())
        self._dispatcher = asyncio.create_task(self._dispatch(requests, times))
        try:
            await self._dispatcher
        except asyncio.CancelledError:
            if not report.was_interrupted:
                raise
        finally:
            lag.cancel()
        report.outcomes = [outcome for turns in self._turns for outcome in turns]
        report.client_cpu_s = process_time() - cpu
        report.duration_s = perf_counter() - report.start
        return report

    def interrupt(self) -> None:
        if self._dispatcher is not None and not self._dispatcher.done():
            self._report.was_interrupted = True
            self._dispatcher.cancel()

    async def _dispatch(self, requests: list[WorkloadRequest], times: list[float]) -> None:
        held_until = 0.0  # when a slot became free
        async with asyncio.TaskGroup() as tasks:  # cancelling it cancels all requests in progress
            for request, turns, at in zip(requests, self._turns, times):
                due = self._report.start + at
                if (wait := due - perf_counter()) > 0:
                    await asyncio.sleep(wait)
                if self._slots is not None:
                    is_held = self._slots.locked()
                    await self._slots.acquire()
                    held_until = perf_counter() if is_held else held_until
                self._report.send_delays.append(perf_counter() - max(due, held_until))
                tasks.create_task(self._converse(request, turns))

    async def _converse(self, request: WorkloadRequest, turns: list[Outcome | None]) -> None:
        """Sends a request, then each of its follow-ups after the conversation so far. A failure
        ends the conversation.
        """
        self._num_under_way += 1
        self._report.peak_concurrency = max(self._report.peak_concurrency, self._num_under_way)
        try:
            said: Any = (
                [{"role": "user", "content": request.prompt}]
                if self._as_messages
                else request.prompt
            )
            for i, follow_up in enumerate([*request.follow_ups, None]):
                turns[i] = outcome = await self._send(said, request.max_tokens)
                self._on_outcome(outcome)
                if outcome.failure is not None:
                    del turns[i + 1 :]
                    return
                if outcome.num_prompt_tokens is None and not request.follow_ups:
                    outcome.num_prompt_tokens = request.num_prompt_tokens
                if follow_up is not None:
                    answer = [
                        {"role": "assistant", "content": outcome.text},
                        {"role": "user", "content": follow_up},
                    ]
                    said = (
                        said + answer if self._as_messages else f"{said}{outcome.text}\n{follow_up}"
                    )
        finally:
            self._num_under_way -= 1
            if self._slots is not None:
                self._slots.release()

    async def _watch_lag(self) -> None:
        while True:
            due = perf_counter() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._report.lags.append(max(0.0, perf_counter() - due))
