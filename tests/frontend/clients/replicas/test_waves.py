"""The coordinator of waves and several engines, with messages and meetings in random order."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from quire.core.waves import EngineWaves
from quire.frontend.clients.replicas.waves import WaveCoordinator
from quire.ipc.errors import EngineDeadError
from quire.ipc.messages import WaveReport


class FakeCore:
    """Requests are numbers of steps; one is computed at a time."""

    def __init__(self) -> None:
        self.executor = self.pausing = self
        self.requests: deque[int] = deque()
        self.has_turn = True
        self.waits: list[tuple[Callable[[], bool], Future]] = []
        self.num_passes = self.num_own = 0

    def join_engines(self) -> None:
        pass

    def join_pass(self) -> None:
        self.num_passes += 1

    def set_turn(self, has_turn: bool) -> None:
        self.has_turn = has_turn

    def has_requests(self) -> bool:
        return bool(self.requests)

    def when(self, is_due: Callable[[], bool]) -> Future:
        self.waits.append((is_due, future := Future()))
        return future

    def settle(self) -> None:
        for wait in [wait for wait in self.waits if wait[0]()]:
            self.waits.remove(wait)
            wait[1].set_result(None)

    def schedule(self) -> str | None:
        return "step" if self.has_turn and self.requests else None

    def execute(self, step: str) -> None:
        self.num_passes, self.num_own = self.num_passes + 1, self.num_own + 1
        self.requests[0] -= 1
        if not self.requests[0]:
            self.requests.popleft()


class SimulatedEngine:
    """An engine and its client, with the messages that are on their way."""

    def __init__(self) -> None:
        self.core = FakeCore()
        self.waves = EngineWaves(
            self.core,
            self.core,
            schedule=self.core.schedule,
            execute=self.core.execute,
            take_rows=lambda **_: None,
            report=lambda report: self.reports.append(report),
            is_full=lambda: False,
        )
        self.inbox: deque[tuple[str, Any]] = deque()
        self.reports: deque[WaveReport] = deque()
        self.contribution: bool | None = None  # while it waits for the others

    def start_wave(self, number: int) -> None:
        self.inbox.append(("start", number))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self.inbox.append((method, answer))
        return await answer

    def take(self) -> None:
        kind, value = self.inbox.popleft()
        if kind == "start":
            self.waves.start(value)
        elif kind == "request":
            self.core.requests.append(value)
        elif kind == "hold_waves":
            held = self.waves.hold_waves()
            held.add_done_callback(lambda _: value.set_result(None))
        else:
            self.waves.release_waves()
            value.set_result(None)
        self.core.settle()

    def begin(self) -> None:
        has_work = self.waves.begin()
        if self.waves.state.is_running:
            self.contribution = has_work
        self.core.settle()


class Simulation:
    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.engines = [SimulatedEngine() for _ in range(self.rng.choice([2, 2, 3, 5]))]
        self.coordinator = WaveCoordinator(self.engines)
        self.decision = False  # of the last meeting
        self.to_leave: set[SimulatedEngine] = set()
        self.num_stops = 0

    def actions(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for engine in self.engines:
            if engine.reports:
                on_report = self.coordinator.on_report
                found.append(lambda e=engine: on_report(e.reports.popleft()))
            if engine.contribution is None:
                if engine.inbox:
                    found.append(engine.take)
                # it takes all that has arrived before it steps, as far as the wire has brought it
                if engine.waves.has_work() and (not engine.inbox or self.rng.random() < 0.5):
                    found.append(engine.begin)
            elif engine in self.to_leave:
                found.append(lambda e=engine: self.leave(e))
        if not self.to_leave and all(e.contribution is not None for e in self.engines):
            found.append(self.meet)
        return found

    def meet(self) -> None:
        self.decision = any(engine.contribution for engine in self.engines)
        self.to_leave = set(self.engines)

    def leave(self, engine: SimulatedEngine) -> None:
        """It may come to the next meeting while others have not left this one."""
        self.to_leave.discard(engine)
        engine.contribution = None
        engine.waves.finish(self.decision)
        engine.core.settle()

    def submit(self) -> None:
        self.rng.choice(self.engines).inbox.append(("request", self.rng.randint(1, 4)))
        self.coordinator.begin()

    async def stop(self) -> None:
        async with self.coordinator.stopped():
            passes = [engine.core.num_passes for engine in self.engines]
            assert len(set(passes)) == 1  # all have stopped after the same pass
            for _ in range(self.rng.randint(0, 30)):
                await asyncio.sleep(0)
                assert not any(engine.waves.state.is_running for engine in self.engines)
            assert [engine.core.num_passes for engine in self.engines] == passes
        self.num_stops += 1

    async def run(self, num_requests: int, num_stops: int) -> None:
        stops: list[asyncio.Task] = []
        while True:
            await asyncio.sleep(0)
            choices: list[Callable[[], Any]] = self.actions()
            if num_requests and (not choices or self.rng.random() < 0.1):
                num_requests -= 1
                self.submit()
            elif len(stops) < num_stops and self.rng.random() < 0.05:
                stops.append(asyncio.ensure_future(self.stop()))
            elif choices:
                self.rng.choice(choices)()
            elif all(stop.done() for stop in stops) and len(stops) == num_stops:
                return
            elif not any(not stop.done() for stop in stops):
                continue  # for the next stop


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_no_engine_steps_alone_and_none_is_left_waiting(first_seed: int) -> None:
    async def all_seeds() -> None:
        for seed in range(first_seed, first_seed + 50):
            simulation = Simulation(seed)
            num_stops = simulation.rng.choice([0, 0, 1, 3])
            run = simulation.run(simulation.rng.randint(1, 12), num_stops)
            await asyncio.wait_for(run, 60)  # else something waits for ever
            engines = simulation.engines
            where = f"seed {seed}"
            assert not any(engine.core.requests for engine in engines), where
            assert not any(engine.waves.state.is_running for engine in engines), where
            assert len({engine.core.num_passes for engine in engines}) == 1, where
            assert len({engine.waves.state.num_ended for engine in engines}) == 1, where
            assert simulation.num_stops == num_stops, where
            # a pass in which nobody has own work is one for requests that could not be scheduled
            passes = engines[0].core.num_passes
            assert 0 < passes <= sum(engine.core.num_own for engine in engines) + num_stops, where

    asyncio.run(all_seeds())


def test_an_idle_group_is_started_with_the_request() -> None:
    engines = [SimulatedEngine(), SimulatedEngine()]
    coordinator = WaveCoordinator(engines)
    for _ in range(2):  # once
        coordinator.begin()
    assert [list(engine.inbox) for engine in engines] == [[("start", 1)]] * 2
    coordinator.on_report(WaveReport(1))
    assert not coordinator.is_running
    coordinator.on_report(WaveReport(1, 2))
    coordinator.on_report(WaveReport(1, 2))  # of the other one
    assert [list(engine.inbox) for engine in engines] == [[("start", 1), ("start", 2)]] * 2


def test_a_dead_engine_is_left_to_who_reads_its_outputs() -> None:
    class Dead(SimulatedEngine):
        def start_wave(self, number: int) -> None:
            raise EngineDeadError("it is gone")

    engines = [Dead(), SimulatedEngine()]
    WaveCoordinator(engines).begin()
    assert list(engines[1].inbox) == [("start", 1)]
