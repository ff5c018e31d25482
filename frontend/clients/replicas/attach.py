"""Attaches to a daemon, and to each of its engines if it has several.

Must not know: requests, how a daemon starts its engines.
"""

from __future__ import annotations

from functools import partial

import msgspec

from ....ipc.config import EngineConfig
from ....ipc.connection import Connection
from ....ipc.errors import EngineStartError
from ....ipc.handshake import Report, open_connection, report_nothing
from ....ipc.messages import Ready
from ....ipc.sockets import replica_address
from ....ipc.threads import in_thread
from ...supervision.supervised_client import SupervisedClient
from ..client import EngineClient, replaces_engines
from ..mp_client import MPClient
from .client import ReplicasClient
from .start import make_client, open_all


async def attach(
    config: EngineConfig, address: str, on_progress: Report = report_nothing
) -> EngineClient:
    """Returns when the engines at `address` are ready.

    config: this program's, of which only the service settings are used. Raises EngineStartError if
    an engine does not serve this program.
    """
    first = await open_connection(config, address, on_progress)
    if first[1].config.device_config.data_parallel_size > 1:
        return await _attach_to_all(config, address, first)
    client = MPClient(config, *first, is_shared=True)
    return SupervisedClient(client, config, address) if replaces_engines(config) else client


async def _attach_to_all(
    config: EngineConfig, address: str, first: tuple[Connection, Ready]
) -> ReplicasClient:
    """Does the rest, when engine 0 is connected."""
    theirs, service = first[1].config, config.service_config
    number, rank = theirs.device_config.data_parallel_size, theirs.device_config.data_parallel_rank
    addresses = [replica_address(address, index) for index in range(number)]
    try:
        if rank:
            raise EngineStartError(
                f"{address} is engine {rank} of a daemon of {number}: attach to the daemon's own "
                f"address, without the number at its end"
            )
        others = await open_all(
            [open_connection(config, one, report_nothing) for one in addresses[1:]]
        )
    except BaseException:
        await in_thread(first[0].close)
        raise
    makers = [
        partial(make_client, config, *connected, one, None)
        for one, connected in zip(addresses, [first, *others], strict=True)
    ]
    own = msgspec.structs.replace(
        theirs.service_config,
        on_engine_death=service.on_engine_death,
        engine_restarts=service.engine_restarts,
    )
    shared = msgspec.structs.replace(
        theirs,
        device_config=msgspec.structs.replace(theirs.device_config, cores=[]),  # engine 0's
        service_config=own,
    )
    return ReplicasClient(makers, first[1], shared)
