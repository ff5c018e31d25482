"""Simulated engine processes with the real core, and their clients over a simulated wire.

A wire keeps the order of each direction. Messages of several clients, and those of the two
directions, arrive in any order. With an engine's death what is on its way to it is lost, and of
what it has sent the first messages arrive.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from concurrent.futures import Future
from typing import Any

from quire.core.engine_core import EngineCore, Host
from quire.frontend.clients.client import CLOSED, EngineClient, result_of
from quire.frontend.clients.journal import Journal
from quire.frontend.supervision.engine_state import NO_WEIGHTS
from quire.frontend.supervision.recovery import Started, Successors
from quire.ipc import messages as m
from quire.ipc.codec import MessageDecoder, MessageEncoder
from quire.ipc.config import EngineConfig
from quire.ipc.errors import EngineDeadError, EngineStartError
from quire.ipc.lora import LoRARequest
from quire.ipc.params import StructuredOutputsParams
from quire.ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from quire.tests.fakes import FakeExecutor
from quire.tests.simulation.world import Death, World

POISON = 96  # a token of prompts that end the engine
MAX_BYTES = 2**26


class ProcessEnds(Exception):
    """Raised where the process would be gone."""


class SimulatedExecutor(FakeExecutor):
    """The fake executor without a thread; grammars and reading adapters take time, and POISON ends
    the process.
    """

    def __init__(self, config: EngineConfig, world: World):
        super().__init__(config)
        self.holds_reads = True
        self.world = world
        overrides = config.model_config.hf_overrides
        self.poison_after = overrides.get("poison_after", 0)
        self.num_state_checkpoints = overrides.get("num_state_checkpoints")

    def submit_model(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self.execute_model(step))
        return future

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute_model(step)
        for slot in (self.slots[number] for number in step.slots):
            is_poison = POISON in slot.token_ids[: slot.request.num_prompt_tokens]
            if is_poison and slot.num_output_tokens >= self.poison_after:
                raise ProcessEnds
        return output

    def read_lora(self, request: LoRARequest) -> Future[str]:
        future = super().read_lora(request)
        self.world.later(self.world.rng.choice([0.0001, 0.003, 0.1]), self.finish_reads)
        return future

    def check_grammar(
        self, params: StructuredOutputsParams, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]:
        future: Future[None] = Future()
        delay_s = self.world.rng.uniform(0.0001, 0.01 if is_known else 1.0)
        self.world.later(delay_s, future.set_result, None)
        return future


class Link:
    """One client's wire to one engine."""

    def __init__(self, world: World, client: SimulatedClient, engine: SimulatedEngine, index: int):
        self.world, self.client, self.engine, self.index = world, client, engine, index
        self._last = [world.now, world.now]  # when the last message of each direction arrives
        self._on_its_way: list[deque[asyncio.Handle]] = [deque(), deque()]
        self._encoder = MessageEncoder(MAX_BYTES)
        self._decoders = [
            MessageDecoder(m.ClientMessage, MAX_BYTES),
            MessageDecoder(m.EngineMessage, MAX_BYTES),
        ]

    def send(self, direction: int, message: Any) -> None:
        """direction: 0 to the engine, 1 to the client."""
        if isinstance(message, m.EngineCoreRequest):
            self.engine.sent_ids.add(message.request_id)
        frames = [bytes(frame) for frame in self._encoder.encode(message)]
        delay_s = self.world.rng.choice([0.0001, 0.001, 0.001, 0.03])
        self._last[direction] = max(self._last[direction] + 1e-6, self.world.now + delay_s)
        handle = self.world.loop.call_at(self._last[direction], self._arrive, direction, frames)
        self._on_its_way[direction].append(handle)

    def _arrive(self, direction: int, frames: list[bytes]) -> None:
        self._on_its_way[direction].popleft()
        message = self._decoders[direction].decode(frames)
        receiver = self.engine if direction == 0 else self.client
        receiver.receive(message, self.index)

    def lose(self, direction: int, num_kept: int) -> None:
        """Only so many messages on their way still arrive."""
        while len(self._on_its_way[direction]) > num_kept:
            self._on_its_way[direction].pop().cancel()

    def num_on_its_way(self, direction: int) -> int:
        return len(self._on_its_way[direction])


class SimulatedEngine:
    """An engine process: takes messages between two steps, as core/engine_proc.py."""

    def __init__(self, world: World, config: EngineConfig, epoch: int):
        self.world = world
        self.number = world.num_engines
        world.num_engines += 1
        host = Host(deliver=self._send_rows, wake=self._run_soon)
        self.core = EngineCore(config, SimulatedExecutor(config, world), host=host, epoch=epoch)
        self._checks_every_step = world.rng.random() < 0.2
        self.ready = self.core.ready
        self.links: dict[int, Link] = {}
        self.exit_signal: signal.Signals | None = None
        self.is_over = False
        self.sent_ids: set[str] = set()  # of the requests that were sent to it
        self._inbox: deque[tuple[Any, int]] = deque()
        self._timer: asyncio.Handle | None = None
        self.log(f"is ready, epoch {epoch}")

    def log(self, event: str) -> None:
        self.world.log(f"engine {self.number}: {event}")

    def connect(self, client: SimulatedClient) -> Link:
        index = max(self.links, default=-1) + 1
        self.links[index] = Link(self.world, client, self, index)
        return self.links[index]

    def receive(self, message: Any, client_index: int) -> None:
        self.log(f"{type(message).__name__} of client {client_index}")
        if self.is_over or self._is_killed():
            return
        self._inbox.append((message, client_index))
        self._run_soon()

    def _is_killed(self) -> bool:
        if not self.world.kills_now():
            return False
        self.end(self.world.rng.choice([*3 * [signal.SIGKILL], signal.SIGSEGV]))
        return True

    def _run_soon(self, delay_s: float = 0.0) -> None:
        if self._timer is None and not self.is_over:
            self._timer = self.world.later(delay_s, self._run)

    def _run(self) -> None:
        self._timer = None
        if self.is_over or self._is_killed():
            return
        try:
            while self._inbox:
                self._handle(*self._inbox.popleft())
            if self.core.has_work():
                rows, ran = self.core.step_fn()
                if self._is_killed():
                    return
                self._send_rows(rows)
                if ran and self._checks_every_step:
                    self.core.scheduler.check_integrity()
                self.core.post_step(ran)
        except ProcessEnds:
            return self.end(signal.SIGSEGV)
        if self.core.has_work() or self.core.scheduler.requests:
            self._run_soon(self.world.rng.choice([0.001, 0.003, 0.02]))

    def _handle(self, message: Any, client_index: int) -> None:
        core = self.core
        match message:
            case m.EngineCoreRequest():
                core.add_request(message, client_index)
            case m.AbortRequests():
                core.abort_requests(message.request_ids, client_index)
            case m.PaceOutputs():
                core.pace_outputs(message.rows_per_s, client_index)
            case m.UtilityCall():
                core.answer_utility(message, client_index, lambda r: self._send(client_index, r))
            case m.Shutdown():  # in the place of a closed connection
                core.drop_client(client_index)
                self.links.pop(client_index)

    def _send_rows(self, rows: dict[int, m.EngineCoreOutputs] | None) -> None:
        for client_index, outputs in (rows or {}).items():
            self.log(f"rows to client {client_index}: {outputs.request_ids} {outputs.num_tokens}")
            self._send(client_index, outputs)

    def _send(self, client_index: int, message: Any) -> None:
        if client_index in self.links and not self.is_over:
            self.links[client_index].send(1, message)

    def end(self, number: signal.Signals | None) -> None:
        if self.is_over:
            return
        self.is_over, self.exit_signal = True, number
        self.log(f"ends by {number}")
        if number is not None:
            self.world.deaths.append(Death(number, self.sent_ids))
        for link in self.links.values():
            link.lose(0, 0)
            link.lose(1, self.world.rng.randint(0, link.num_on_its_way(1)))
            delay_s = 0.0 if link.num_on_its_way(1) == 0 else 0.1
            self.world.later(delay_s + self.world.rng.uniform(0, 0.02), link.client.on_death)


class SimulatedClient(EngineClient):
    """What SupervisedClient needs of an MPClient."""

    def __init__(
        self, world: World, engine: SimulatedEngine, *, shared: bool, journal: Journal | None = None
    ):
        self.is_shared = shared
        self.journal = Journal() if journal is None else journal
        self.ready = engine.ready
        self._world, self._engine = world, engine
        self._link = engine.connect(self)
        self._death: str | None = None
        self._outputs: deque[m.EngineCoreOutputs] = deque()
        self._results: dict[int, m.UtilityResult] = {}
        self._num_calls = 0
        self._waiters: list[asyncio.Future] = []

    @property
    def exit_signal(self) -> signal.Signals | None:  # type: ignore[override]
        return None if self.is_shared else self._engine.exit_signal

    def receive(self, message: Any, client_index: int) -> None:
        if self._death == CLOSED:
            return
        if isinstance(message, m.EngineCoreOutputs):
            self._outputs.append(message)
        elif isinstance(message, m.UtilityResult):
            self._results[message.call_id] = message
        self._wake()

    def on_death(self) -> None:
        if self._death is None:
            self._death = f"the engine ended by {self._engine.exit_signal}"
            self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _send(self, message: Any) -> None:
        self._raise_if_dead()
        self._link.send(0, message)

    def add_request(self, request: m.EngineCoreRequest) -> None:
        """An engine would compute a token again that is missing, and nobody would notice."""
        tokens = self._world.received.get(request.request_id, [])
        assert request.resume_tokens == tokens, f"{request.request_id} has {tokens}"
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(m.AbortRequests(request_ids))

    def pace_outputs(self, rows_per_s: int) -> None:
        self._send(m.PaceOutputs(rows_per_s))

    async def get_output_async(self) -> m.EngineCoreOutputs:
        while not self._outputs:
            self._raise_if_dead()
            await self._changed()
        outputs = self._outputs.popleft()
        end = 0
        for i, request_id in enumerate(outputs.request_ids):
            begin, end = end, end + outputs.num_tokens[i]
            tokens = self._world.received.setdefault(request_id, [])
            tokens[outputs.first_indices[i] :] = outputs.token_ids[begin:end]
        return outputs

    async def _changed(self) -> None:
        self._waiters.append(waiter := self._world.loop.create_future())
        await waiter

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self._num_calls += 1
        number = self._num_calls
        self._send(m.UtilityCall(number, method, list(args)))
        while number not in self._results:
            self._raise_if_dead()
            await self._changed()
        return result_of(self._results.pop(number))

    def shutdown(self) -> None:
        if self._death is None:
            if self.is_shared:
                self._link.send(0, m.Shutdown())
            else:
                self._engine.end(None)
        self._death = CLOSED
        self._wake()

    async def shutdown_async(self) -> None:
        self.shutdown()


class SimulatedSuccessors(Successors):
    """`daemon` is that of all clients, if there is one."""

    def __init__(self, world: World, daemon: Daemon | None, *arguments: Any):
        super().__init__(*arguments)
        self._world, self._daemon = world, daemon

    async def next(self, epoch: int) -> Started:
        world = self._world
        await asyncio.sleep(world.rng.uniform(0.001, 0.01 if self.is_shared else 1.5))
        while self._daemon is not None and self._daemon.engine.is_over:
            await asyncio.sleep(0.1)
        if self._daemon is not None:
            engine = self._daemon.engine
        elif world.kills_now():
            ended = EngineStartError("the engine ended while it started")
            raise world.rng.choice([ended, OSError(24, "Too many open files")])
        else:
            engine = SimulatedEngine(world, self.config, epoch)
        client = SimulatedClient(world, engine, shared=self.is_shared, journal=self.journal)
        return Started(client, NO_WEIGHTS)


class SimulatedLoop:
    """In the place of an OwnLoop: the loop of the world."""

    def __init__(self, world: World):
        self.run = world.run

    def close(self, last: Any = None) -> None:
        pass


class Daemon:
    """The engine of several clients; another takes its place some time after it ends."""

    def __init__(self, world: World, config: EngineConfig):
        self._world, self._config = world, config
        self.engine = SimulatedEngine(world, config, 0)
        self._watch()

    def _watch(self) -> None:
        if self.engine.is_over:
            self.engine = SimulatedEngine(self._world, self._config, 0)
        self._world.later(self._world.rng.uniform(0.2, 1.0), self._watch)
