"""Successors makes the engine that takes the place of a dead one.

Must not know: requests, why an engine died, how often it may be replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ...ipc import platform_tuning
from ...ipc.config import EngineConfig
from ...ipc.errors import EngineStartError, ModelLoadError
from ...ipc.messages import Ready
from ...ipc.process import engine_command
from ..clients.client import EngineClient
from ..clients.mp_client import MPClient
from .engine_state import NO_WEIGHTS
from .standby import Standby
from .standby_engines import Started

# After a daemon has ended, another is looked for at this interval, and for so long.
ATTACH_INTERVAL_S, ATTACH_TIMEOUT_S = 0.1, 30.0


class Successors:
    """engine, command: as in MPClient.start; a daemon is not started but attached to again. first:
    the engine in use. There is a `standby` if the configuration wants one.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: str,
        command: Sequence[str] | None,
        first: EngineClient,
    ):
        # Half of a start is imports, which need no configuration (see early_engine).
        device = config.device_config.device
        is_early = platform_tuning.is_enabled() and not config.model_config.logits_processors
        imports_for = device if is_early else None
        early = engine_command(imports_for=imports_for)
        self.config = config
        self.address = engine
        self.given_command = command
        self.command = command or (early if device == "cpu" else engine_command())
        self.engine_index = first.ready.engine_index
        self.journal = first.journal
        self.is_shared = first.is_shared
        self.standby: Standby | None = None
        if config.service_config.standby:
            self.standby = Standby(config, command or early, self.journal)
        self._attach_timeout_s = min(ATTACH_TIMEOUT_S, config.service_config.startup_timeout_s)

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

    async def next(self, epoch: int) -> Started:
        """Takes the standby, or starts an engine."""
        taken = None if self.standby is None else await self.standby.take()
        if taken is not None:
            return await taken.take_over()
        return Started(await self.start(epoch), NO_WEIGHTS)

    async def start(self, epoch: int) -> EngineClient:
        deadline = time.monotonic() + self._attach_timeout_s
        while True:
            try:
                return await MPClient.start(
                    self.config,
                    self.address,
                    epoch=epoch,
                    engine_index=self.engine_index,
                    command=self.command,
                    journal=self.journal,
                )
            except EngineStartError:
                if not self.is_shared or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(ATTACH_INTERVAL_S)
