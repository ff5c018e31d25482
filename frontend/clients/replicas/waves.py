"""WaveCoordinator starts the waves of engines that share experts (core/waves.py), and stops all of
them at one boundary between steps.

Must not know: requests, how a message travels.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from ....ipc.errors import EngineDeadError
from ....ipc.messages import WaveReport


class Engine(Protocol):
    """What the coordinator needs of an engine's client."""

    def start_wave(self, number: int) -> None: ...

    async def call_utility_async(self, method: str, *args: Any) -> Any: ...


class WaveCoordinator:
    """All engines get its messages in the same order. A wave is started when an engine wants it, or
    when a request comes for engines that are idle as far as is known here.
    """

    def __init__(self, engines: Sequence[Engine]):
        self._engines = engines
        self._num_ended = self._num_started = 0
        self._stopping = asyncio.Lock()
        self._is_held = False

    @property
    def is_running(self) -> bool:
        return self._num_started > self._num_ended

    def begin(self) -> None:
        """Notes that an engine has got a request."""
        if not self.is_running and not self._is_held:
            self._start(self._num_ended + 1)

    def on_report(self, report: WaveReport) -> None:
        self._num_ended = max(self._num_ended, report.num_ended)
        # A wave that is wanted while engines are held is started when they are released.
        if report.wanted > self._num_started and not self._is_held:
            self._start(report.wanted)

    def _start(self, number: int) -> None:
        self._num_started = number
        for engine in self._engines:
            with contextlib.suppress(EngineDeadError):  # which whoever reads its outputs finds
                engine.start_wave(number)

    @contextlib.asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Returns a context in which no engine computes, because all have stopped after the same
        pass.
        """
        async with self._stopping:
            self._is_held = True
            try:
                await self._call("hold_waves")
                yield
            finally:
                self._is_held = False
                await self._call("release_waves")
                self.begin()

    async def _call(self, method: str) -> None:
        await asyncio.gather(*(one.call_utility_async(method) for one in self._engines))
