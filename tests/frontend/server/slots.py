"""Model slots over engines that only note what is done with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace
from quire.frontend.clients.client import Restarts
from quire.frontend.outputs import RequestMetrics, RequestOutput
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.model_slot import ModelSlot
from quire.frontend.server.models import Models
from quire.frontend.server.response_store import ResponseStore
from quire.frontend.server.state import ServerState
from quire.ipc.errors import EngineDeadError, ModelLoadError
from quire.tests.frontend.server.scripted import ScriptedEngine

MIB = 2**20


@cache
def scripted() -> ScriptedEngine:
    """One for all tests: its tokenizer takes a while to load."""
    return ScriptedEngine(["a", "b"])


class NotingEngine:
    """Takes `delay_s` for everything."""

    def __init__(self, name: str, log: list[str], delay_s: float):
        self.name, self._log, self._delay_s = name, log, delay_s
        config = scripted().config
        model_config = replace(config.model_config, served_model_name=name)
        self.config, self.tokenizer = (
            replace(config, model_config=model_config),
            scripted().tokenizer,
        )
        self.get_default_sampling_params = scripted().get_default_sampling_params
        self.client = SimpleNamespace(restarts=Restarts(), standby_is_ready=None)
        self.dead_error: EngineDeadError | None = None
        self.is_running, self.is_asleep = True, False

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    def set_record_token_times(self, is_wanted: bool) -> None: ...

    def set_max_outputs_per_s(self, number: int) -> None: ...

    def die(self) -> None:
        self.dead_error = EngineDeadError(f"{self.name} was killed")

    async def generate(
        self, *arguments: Any, on_submitted: Callable[[RequestMetrics], None], **_: Any
    ) -> AsyncIterator[RequestOutput]:
        times = {"queued_ts": 1.0, "scheduled_ts": 1.0, "first_token_ts": 2.0, "last_token_ts": 2.0}
        on_submitted(RequestMetrics(1.0, finished_time=4.0, **times))
        async for output in scripted().generate(*arguments):
            yield output

    async def get_metrics(self) -> dict[str, int]:
        return {}

    async def call_utility(self, method: str, *_: Any) -> Any:
        assert self.is_running
        if self.dead_error is not None:
            raise self.dead_error
        await asyncio.sleep(self._delay_s)
        if method in ("sleep", "wake_up"):
            self.is_asleep = method == "sleep"
            self._log.append(f"{method} {self.name}")
        return {}

    async def shutdown_async(self) -> None:
        await asyncio.sleep(self._delay_s)
        self.is_running = False
        self._log.append(f"end {self.name}")


def make_slots(
    sizes: dict[str, int],
    *,
    limit: int,
    delay_s: float = 0.0,
    config: ServerConfig = ServerConfig(),
    **options: Any,
) -> tuple[Models, list[str], dict[str, list[Exception]]]:
    """Models of these sizes in MiB, of which the process takes 10; the log of what happens; and by
    name the errors with which the next starts fail.
    """
    log: list[str] = []
    failures: dict[str, list[Exception]] = {}

    async def start(args: Any, engine: str, report: Callable[[str, float], None]) -> Any:
        name = args.model
        try:
            await asyncio.sleep(delay_s)
        except asyncio.CancelledError:
            log.append(f"cancelled {name}")
            raise
        if failures.get(name):
            raise failures[name].pop(0)
        log.append(f"start {name}")
        return NotingEngine(name, log, delay_s)

    responses = ResponseStore(config.max_stored_responses)
    slots = [make_slot(name, size, config, responses) for name, size in sizes.items()]
    first = next(iter(sizes))
    models = Models(
        slots, first, limit_bytes=limit * MIB, start=start, **{"keep_alive_s": -1.0} | options
    )
    return models, log, failures


def make_slot(
    name: str, size: int, config: ServerConfig, responses: ResponseStore | None = None
) -> ModelSlot:
    """`size`: in MiB."""
    plan: Any = SimpleNamespace(
        num_engines=1,
        weights_bytes=(size - 10) * MIB,
        kv_cache_bytes=0,
        runtime_bytes=10 * MIB,
        max_model_len=512,
    )
    args: Any = SimpleNamespace(model=name)
    state = ServerState(config, name, is_on_demand=True, responses=responses)
    return ModelSlot(args, state, scripted().config, plan)


def bad_files() -> ModelLoadError:
    return ModelLoadError("its files are bad")
