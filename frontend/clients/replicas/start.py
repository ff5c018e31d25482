"""Starts the engines of a ReplicasClient, each with its part of the machine.

Must not know: requests, how replicas are used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ....ipc.config import DeviceConfig, EngineConfig
from ....ipc.connection import Connection
from ....ipc.errors import InvalidParameterError
from ....ipc.handshake import Report, open_connection, report_nothing
from ....ipc.machine import available_cores, divide_cores, numa_cores, read_cores
from ....ipc.messages import Ready
from ....ipc.models.expert_parallel import shares_experts
from ....ipc.threads import in_thread
from ...supervision.recovery import Successors
from ...supervision.supervised_client import SupervisedClient
from ..client import EngineClient, replaces_engines
from ..journal import Journal
from ..mp_client import MPClient
from .client import Place, ReplicasClient


def replica_configs(config: EngineConfig, directory: str = "") -> list[EngineConfig]:
    """Returns the configuration of each engine, with its number, its cores, and as many threads,
    which its ranks divide. Engines that share experts find each other in `directory`.

    Raises InvalidParameterError for data_parallel_cores.
    """
    device = config.device_config
    is_here = device.distributed_executor_backend != "ray"  # else Ray divides its nodes
    cores = _divided(device) if is_here else [[]] * device.data_parallel_size
    num_threads = device.num_threads
    if (
        is_here
        and num_threads is None
        and device.device == "cpu"
        and "OMP_NUM_THREADS" not in os.environ
    ):
        most = available_cores() // device.data_parallel_size
        most = min([most, *(len(of_one) for of_one in cores if of_one)])
        num_threads = max(1, most // _num_ranks(device))
    return [
        msgspec.structs.replace(
            config,
            device_config=msgspec.structs.replace(
                device,
                data_parallel_rank=rank,
                cores=cores[rank],
                num_threads=num_threads,
                expert_group=directory,
            ),
        )
        for rank in range(device.data_parallel_size)
    ]


def daemon_configs(config: EngineConfig) -> list[EngineConfig]:
    """Returns the configuration of each engine of a daemon, of one or several.

    Raises InvalidParameterError for engines that need one program.
    """
    if config.device_config.data_parallel_size == 1:
        return [config]
    if shares_experts(config):
        raise InvalidParameterError(
            "enable_expert_parallel",
            "needs one program over the engines, which keeps them in step: several programs or "
            "server processes run engines that have all experts each",
        )
    return replica_configs(config)


def _divided(device: DeviceConfig) -> list[list[int]]:
    """Returns the cores of each replica. An empty list allows any core."""
    number, nodes = device.data_parallel_size, numa_cores()
    if not device.data_parallel_cores:
        # There are more threads than cores, so the system divides its time between them.
        usable = len(nodes) and min(map(len, nodes)) * len(nodes)
        if (device.num_threads or 1) * _num_ranks(device) * number > usable:
            return [[] for _ in range(number)]
        return divide_cores(nodes, number)
    if len(device.data_parallel_cores) != number:
        raise InvalidParameterError(
            "data_parallel_cores",
            f"must have an entry for each of data_parallel_size={number} engines, got "
            f"{len(device.data_parallel_cores)}",
        )
    if not nodes:
        raise InvalidParameterError(
            "data_parallel_cores", "must be empty on macOS, which binds no process to cores"
        )
    allowed = {core for node in nodes for core in node}
    divided = []
    for text in device.data_parallel_cores:
        try:
            cores = read_cores(text)
        except ValueError as error:
            raise InvalidParameterError("data_parallel_cores", str(error)) from None
        if not cores or not allowed.issuperset(cores):
            raise InvalidParameterError(
                "data_parallel_cores",
                f"must name cores that this process may use ({min(allowed)} to {max(allowed)}), "
                f"got {text!r}",
            )
        divided.append(cores)
    return divided


def _num_ranks(device: DeviceConfig) -> int:
    return device.tensor_parallel_size * device.pipeline_parallel_size


async def start_replicas(
    config: EngineConfig,
    on_progress: Report = report_nothing,
    *,
    command: Sequence[str] | None = None,
) -> EngineClient:
    """Starts all engines at once. Returns when they are ready. `on_progress` reports the first
    one's progress.

    config: resolved, with data_parallel_size. command: as in MPClient.start. Raises what prevented
    an engine from starting, after the others were ended.

    Each engine that dies is replaced, if the configuration wants that. The death of one that shares
    experts breaks the passes of all, so all of these are replaced together, and the requests of
    all continue from the journal.
    """
    if not shares_experts(config):
        return await _start(config, replica_configs(config), on_progress, command)
    group = await start_group(config, on_progress, command=command)
    if not replaces_engines(config):
        return group
    return SupervisedClient(group, config, command=command, successors=NextGroups)


async def start_group(
    config: EngineConfig,
    on_progress: Report = report_nothing,
    *,
    command: Sequence[str] | None = None,
    journal: Journal | None = None,
    epoch: int = 0,
) -> ReplicasClient:
    """Works as start_replicas, for engines that share experts. They are not replaced."""
    with TemporaryDirectory(prefix="quire-") as directory:  # until they have found each other
        configs = replica_configs(config, directory)
        return await _start(config, configs, on_progress, command, journal, epoch)


class NextGroups(Successors):
    """Starts the groups that take the place of broken ones."""

    async def start(self, epoch: int) -> EngineClient:
        return await start_group(
            self.config, command=self.given_command, journal=self.journal, epoch=epoch
        )


async def _start(
    config: EngineConfig,
    configs: list[EngineConfig],
    on_progress: Report,
    command: Sequence[str] | None,
    journal: Journal | None = None,
    epoch: int = 0,
) -> ReplicasClient:
    opened = await open_all(
        [
            open_connection(
                own,
                "process",
                report_nothing if rank else on_progress,
                epoch=epoch,
                engine_index=rank,
                command=command,
            )
            for rank, own in enumerate(configs)
        ]
    )
    makers = [
        partial(make_client, own, *connected, "process", command)
        for own, connected in zip(configs, opened, strict=True)
    ]
    return ReplicasClient(makers, opened[0][1], config, journal)


async def open_all(
    openings: Sequence[Coroutine[Any, Any, tuple[Connection, Ready]]],
) -> list[tuple[Connection, Ready]]:
    """Opens all at once. If that of one fails, the others are closed."""
    starts = [asyncio.ensure_future(opening) for opening in openings]
    try:
        return await asyncio.gather(*starts)
    except BaseException:
        for start in starts:
            start.cancel()
        for started in await asyncio.gather(*starts, return_exceptions=True):
            if not isinstance(started, BaseException):
                await in_thread(started[0].close)
        raise


def make_client(
    config: EngineConfig,
    connection: Connection,
    ready: Ready,
    engine: str,
    command: Sequence[str] | None,
    place: Place,
) -> EngineClient:
    """Makes the client of one engine. engine, command: as in MPClient.start."""
    client = MPClient(
        config,
        connection,
        ready,
        is_shared=engine != "process",
        journal=place.journal,
        on_wave=place.on_wave,
    )
    if not replaces_engines(config) or shares_experts(config):
        return client
    return SupervisedClient(
        client, config, engine, command=command, hand_over=place.hand_over, restarts=place.restarts
    )
