"""Engines that share experts: a group that starts, ends and is replaced as a whole.

Must not know: requests, how engines reach each other.

An engine's death breaks the passes of all. So the supervision that replaces one engine
(SupervisedClient) has the whole group in the place of that engine: when one dies, all are started
again, and the requests of all continue from the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....ipc.config import EngineConfig
from ....ipc.handshake import Report, report_nothing
from ...supervision.recovery import Successors
from ...supervision.supervised_client import SupervisedClient
from ..client import EngineClient
from .client import ReplicasClient
from .start import open_replicas, start_replicas


class NextGroups(Successors):
    """Starts the groups that take the place of broken ones."""

    def _start(self, epoch: int) -> Any:
        return open_replicas(self.config, command=self.replica_command, epoch=epoch)

    async def _start_async(self, epoch: int) -> Any:
        return await start_replicas(self.config, command=self.replica_command, epoch=epoch)


def _supervised(
    group: ReplicasClient, config: EngineConfig, command: Sequence[str] | None
) -> EngineClient:
    service = config.service_config
    if service.on_engine_death != "restart" or not service.engine_restarts:
        return group
    return SupervisedClient(group, config, command=command, successors=NextGroups)


async def start_group(
    config: EngineConfig,
    on_progress: Report = report_nothing,
    *,
    command: Sequence[str] | None = None,
) -> EngineClient:
    """As start_replicas, of engines that share experts."""
    return _supervised(await start_replicas(config, on_progress, command=command), config, command)


def open_group(
    config: EngineConfig,
    on_progress: Report = report_nothing,
    *,
    asyncio_mode: bool = False,
    command: Sequence[str] | None = None,
) -> EngineClient:
    """As open_replicas, of engines that share experts."""
    group = open_replicas(config, on_progress, asyncio_mode=asyncio_mode, command=command)
    return _supervised(group, config, command)
