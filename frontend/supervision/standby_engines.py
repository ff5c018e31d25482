"""What stands by: on a CPU an engine that is ready, on a GPU the process of an engine that has no
configuration yet.

Must not know: when one is started, when it takes over, the engine in use.

    CPU    process ─▶ imports ─▶ weights, KV cache ─▶ waits ─▶ is in use
    GPU    process ─▶ imports ─▶ waits ─▶ CUDA ─▶ weights, KV cache ─▶ is in use

The memory of a GPU is taken at once, by weights as by a cache of which no page is used, and the
engine in use has it. A process that has no configuration has not begun to use CUDA.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...ipc.config import EngineConfig
from ...ipc.connection import Connection
from ..clients.client import EngineClient
from ..clients.journal import Journal
from ..clients.mp_client import MPClient
from .engine_state import NO_WEIGHTS, Weights


class Started(NamedTuple):
    engine: EngineClient
    weights: Weights  # that it has loaded already


class StandbyEngine(Protocol):
    @property
    def engine_pid(self) -> int: ...

    @property
    def pidfd(self) -> int:
        """Returns a descriptor that is readable when the process is gone."""
        ...

    def load(self, weights: Weights) -> None:
        """Loads what clients have set, if it can have weights before it takes over."""
        ...

    async def take_over(self) -> Started:
        """Returns the engine, which is ready. Called once, when the last engine is gone.

        Raises the engine's own exception if it cannot start, for example NotEnoughMemoryError.
        """
        ...

    def describe_death(self) -> str: ...

    def shutdown(self) -> None: ...


async def start_standby(
    config: EngineConfig, command: Sequence[str], journal: Journal, epoch: int
) -> StandbyEngine:
    """Starts a process that can be engine number `epoch`. command, journal: as in MPClient."""
    if config.device_config.device == "cpu":
        client = await MPClient.start(config, epoch=epoch, command=command, journal=journal)
        return LoadedEngine(client)
    return WaitingProcess(config, command, journal, epoch)


class LoadedEngine:
    """An engine that has its weights, and a KV cache that nothing has touched."""

    def __init__(self, client: MPClient):
        self._client = client
        self._weights = NO_WEIGHTS
        self.engine_pid, self.pidfd = client.engine_pid, client.pidfd

    def load(self, weights: Weights) -> None:
        if weights.path is not None:
            asyncio.run(self._client.call_utility_async("load_weights", weights.path))
        self._weights = weights

    async def take_over(self) -> Started:
        return Started(self._client, self._weights)

    def describe_death(self) -> str:
        return self._client.describe_death()

    def shutdown(self) -> None:
        self._client.shutdown()


class WaitingProcess:
    """A process that imports what an engine needs, and then waits for its configuration. It has
    no memory of a GPU.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str], journal: Journal, epoch: int):
        self._config, self._journal, self._epoch = config, journal, epoch
        max_message_bytes = config.service_config.max_message_bytes
        self._connection = Connection(max_message_bytes)
        try:
            self._connection.spawn(command, max_message_bytes)
        except BaseException:
            self._connection.close()
            raise
        self.engine_pid, self.pidfd = self._connection.engine_pid, self._connection.pidfd

    def load(self, weights: Weights) -> None:
        """Loads nothing: the weights that clients have set follow those of the configuration when
        it has taken over.
        """

    async def take_over(self) -> Started:
        client = await MPClient.start(
            self._config, epoch=self._epoch, waiting=self._connection, journal=self._journal
        )
        return Started(client, NO_WEIGHTS)

    def describe_death(self) -> str:
        return self._connection.describe_death()

    def shutdown(self) -> None:
        self._connection.close()  # it has nothing to save
