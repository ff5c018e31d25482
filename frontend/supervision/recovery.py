"""What a recovery waits for, in blocking code and in asyncio; and where the next engine comes from.

Must not know: requests, why an engine died, how often it may be replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NamedTuple

from ...ipc.config import EngineConfig
from ...ipc.errors import EngineDeadError, EngineStartError, ModelLoadError
from ...ipc.messages import Ready
from ...ipc.process import engine_command
from ...ipc.threads import in_thread
from ..clients.client import CLOSED
from ..clients.mp_client import MPClient
from .engine_state import NO_WEIGHTS, Weights
from .standby import Standby

# How often a daemon is looked for that has ended, and how long.
ATTACH_INTERVAL_S, ATTACH_TIMEOUT_S = 0.1, 30.0
WAIT_INTERVAL_S = 0.02  # between two looks at a condition


class Sleep(NamedTuple):
    seconds: float


class Wait(NamedTuple):
    """Until `holds` is true; in asyncio only."""

    holds: Callable[[], bool]


class Start(NamedTuple):
    """Starts an engine, or takes the standby; Started is sent back."""

    epoch: int


class Started(NamedTuple):
    engine: MPClient
    weights: Weights  # that it has loaded already


class Call(NamedTuple):
    """Calls a utility of a new engine."""

    engine: MPClient
    method: str
    args: tuple


class Close(NamedTuple):
    engine: MPClient


Action = Sleep | Wait | Start | Call | Close
Recovery = Generator[Action, Any, None]


def run(recovery: Recovery, perform: Callable[[Action], Any]) -> None:
    answer: Any = None
    try:
        action = next(recovery)
        while True:
            try:
                answer = perform(action)
            except Exception as error:
                action = recovery.throw(error)
            else:
                action = recovery.send(answer)
    except StopIteration:
        pass


async def run_async(recovery: Recovery, perform: Callable[[Action], Awaitable[Any]]) -> None:
    answer: Any = None
    try:
        action = next(recovery)
        while True:
            try:
                answer = await perform(action)
            except Exception as error:
                action = recovery.throw(error)
            else:
                action = recovery.send(answer)
    except StopIteration:
        pass


class Successors:
    """Starts the engines that take the place of dead ones, and performs the other actions.

    engine, command: as in MPClient; a daemon is not started but attached to again. `close` ends
    what waits. `standby`: if the configuration wants one.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: str,
        command: Sequence[str] | None,
        *,
        asyncio_mode: bool = False,
        engine_index: int = 0,
    ):
        # As in early_engine: half of a start is imports, which need no configuration.
        is_own = config.device_config.device == "cpu" and not config.model_config.logits_processors
        self.replica_command = command
        command = command or engine_command(imports_early=is_own)
        self.config, self.address, self.command = config, engine, command
        self.engine_index = engine_index
        self.standby: Standby | None = None
        if config.service_config.standby:
            self.standby = Standby(config, asyncio_mode, command)
        self.is_shared = engine != "process"
        self._attach_timeout_s = min(ATTACH_TIMEOUT_S, config.service_config.startup_timeout_s)
        self.is_closed = False
        self._closing = threading.Event()

    def close(self) -> None:
        """Ends what waits. `end_standby` follows."""
        self.is_closed = True
        self._closing.set()

    def end_standby(self) -> None:
        if self.standby is not None:
            self.standby.close()

    def raise_if_closed(self) -> None:
        if self.is_closed:
            raise EngineDeadError(CLOSED)

    def check_same_model(self, old: Ready, new: Ready) -> None:
        """Raises ModelLoadError if the daemon that has taken the place of another runs another
        model.
        """
        was, now = old.config.model_config, new.config.model_config
        if self.is_shared and was != now:
            raise ModelLoadError(
                f"the engine at {self.address} now runs {now.model}, with other settings than the "
                f"{was.model} of before"
            )

    def perform(self, action: Action) -> Any:
        match action:
            case Sleep(seconds):
                self._closing.wait(seconds)
            case Start(epoch):
                started = self._take_standby() or Started(self._start(epoch), NO_WEIGHTS)
                if self.is_closed:
                    started.engine.shutdown()
                    self.raise_if_closed()
                return started
            case Call(engine, method, args):
                engine.call_utility(method, *args)
            case Close(engine):
                engine.shutdown()

    def _take_standby(self) -> Started | None:
        taken = None if self.standby is None else self.standby.take()
        return None if taken is None else Started(*taken)

    def _start(self, epoch: int) -> MPClient:
        deadline = time.monotonic() + self._attach_timeout_s
        while True:
            self.raise_if_closed()
            try:
                return MPClient(
                    self.config,
                    self.address,
                    epoch=epoch,
                    engine_index=self.engine_index,
                    command=self.command,
                )
            except EngineStartError:
                if not self.is_shared or time.monotonic() > deadline:
                    raise
                self._closing.wait(ATTACH_INTERVAL_S)

    async def perform_async(self, action: Action) -> Any:
        import asyncio

        match action:
            case Sleep(seconds):
                await asyncio.sleep(seconds)
            case Wait(holds):
                while not holds():
                    await asyncio.sleep(WAIT_INTERVAL_S)
            case Start(epoch):
                taken = None
                if self.standby is not None:
                    taken = await in_thread(
                        self._take_standby,
                        on_cancel=self.standby.begin_close,
                        discard=lambda started: started and started.engine.shutdown(),
                    )
                return taken or Started(await self._start_async(epoch), NO_WEIGHTS)
            case Call(engine, method, args):
                await engine.call_utility_async(method, *args)
            case Close(engine):
                await engine.shutdown_async()

    async def _start_async(self, epoch: int) -> MPClient:
        import asyncio

        deadline = time.monotonic() + self._attach_timeout_s
        while True:
            try:
                return await MPClient.start(
                    self.config,
                    self.address,
                    epoch=epoch,
                    engine_index=self.engine_index,
                    command=self.command,
                )
            except EngineStartError:
                if not self.is_shared or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(ATTACH_INTERVAL_S)
