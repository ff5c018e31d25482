"""Ranks that are actors of a Ray cluster: `distributed_executor_backend=ray`.

Must not know: which messages ranks get, what a rank computes.

Ray chooses the nodes (one placement group, a bundle of CPUs for each rank), starts the processes,
and says why one is gone. Messages and tensors do not go through Ray (network.py, torch_links.py).

Only this module imports Ray, and only when it is used. The actors and the placement group belong to
the engine's process: Ray ends them when it is gone, and each rank ends itself when it loses its
connection.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import socket
import threading
import time
from typing import Any

import msgspec

from ...ipc import platform_tuning
from ...ipc.config import EngineConfig
from ...ipc.errors import EngineStartError, InvalidParameterError
from ...ipc.log_format import configure_logging, current_format
from ...ipc.models.ranks import num_ranks
from ...ipc.process import STACKS_SIGNAL
from .messages import NetworkEnds
from .network import NetworkLinks, NetworkRanks
from .rank import Rank

logger = logging.getLogger("quire.ray")

NAME = "distributed_executor_backend"
ROOM_S = 0.5  # share of the time to start in which the cluster has to find, or grow, room
MAX_CAUSE_LINES = 12
CONNECT_TIMEOUT_S = 5.0


class RankActor:
    """A rank's process. Ray makes an actor of this class."""

    def run(self, ends: bytes, num_threads: int, log_level: int, log_format: str) -> None:
        """Returns after a Leave. ends: a NetworkEnds, as JSON."""
        ray: Any = importlib.import_module("ray")
        # what the launcher has chosen counts, not what Ray sets for each actor
        os.environ.pop("OMP_NUM_THREADS", None)
        configure_logging(log_level, log_format)
        with contextlib.suppress(RuntimeError, OSError, ValueError):  # Ray may own it
            faulthandler.register(STACKS_SIGNAL, all_threads=True)
        platform_tuning.begin_start()
        decoded = msgspec.json.decode(ends, type=NetworkEnds)
        links = NetworkLinks(decoded, ray.util.get_node_ip_address(), lambda: os._exit(1))
        Rank(links, num_threads).run()
        links.close()


class RayLauncher:
    """Implements Launcher (network.py)."""

    def __init__(self, config: EngineConfig):
        """Connects to the cluster. Raises InvalidParameterError if there is none."""
        self._ray: Any = importlib.import_module("ray")
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            _connect(self._ray)
        self.host: str = self._ray.util.get_node_ip_address()
        self._num_threads = config.device_config.num_threads or int(
            os.environ.get("OMP_NUM_THREADS", 0)
        )
        self._room_timeout_s = ROOM_S * config.service_config.startup_timeout_s
        self._size = num_ranks(config)
        self._num_of_all = self._size * config.device_config.data_parallel_size  # engines
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []  # of RankActor.run; ready when a rank has ended

    def start(self, ends: list[NetworkEnds]) -> None:
        """See Launcher."""
        ray = self._ray
        num_cpus = self._num_threads or cpus_per_rank(self._cpus_of_nodes(), self._num_of_all)
        self._group = ray.util.placement_group([{"CPU": num_cpus}] * self._size, strategy="PACK")
        self._wait_for_room(num_cpus)
        scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        level = logging.getLogger("quire").getEffectiveLevel()
        for one in ends:
            actor = ray.remote(RankActor).options(
                name=f"quire-{os.getpid()}-{self._group.id.hex()[:8]}-rank-{one.rank}",
                num_cpus=num_cpus,
                max_restarts=0,
                scheduling_strategy=scheduling(self._group, one.rank),
            )
            self._actors.append(actor.remote())
            arguments = msgspec.json.encode(one), num_cpus, level, current_format()
            self._runs.append(self._actors[-1].run.remote(*arguments))

    def _wait_for_room(self, num_cpus: int) -> None:
        deadline = time.monotonic() + self._room_timeout_s
        has_warned = False
        while not self._group.wait(2.0):
            if not has_warned:
                logger.warning(
                    "waiting for %d bundles of %d CPUs in the Ray cluster, whose nodes have %s",
                    *(self._size, num_cpus, self._cpus_of_nodes()),
                )
            has_warned = True
            if time.monotonic() > deadline:
                raise EngineStartError(
                    f"{NAME}=ray: the cluster has had no room for {self._size} ranks with "
                    f"{num_cpus} CPUs each (num_threads) for {self._room_timeout_s:.0f} s; its "
                    f"nodes have {self._cpus_of_nodes()} CPUs, other programs' included"
                )

    def _cpus_of_nodes(self) -> list[int]:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return [int(node["Resources"].get("CPU", 0)) for node in nodes]

    def cause_of(self, rank: int, timeout_s: float) -> str | None:
        """See Launcher."""
        if not self._runs:
            return None
        ended, _ = self._ray.wait([self._runs[rank]], timeout=timeout_s)
        if not ended:
            return None
        try:
            self._ray.get(ended[0])
        except self._ray.exceptions.RayActorError as error:
            lines = _lines(error)
            where = [line for line in lines if line.startswith(("pid: ", "ip: "))]
            return ", ".join([*where, *lines[-1:]])
        except Exception as error:  # the rank's own, with its traceback
            return "\n".join(_lines(error)[-MAX_CAUSE_LINES:]) or type(error).__name__
        return "it has left"

    def end(self, timeout_s: float) -> None:
        """See Launcher."""
        ray = self._ray
        if timeout_s > 0 and self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        if self._is_own:
            ray.shutdown()


def ray_ranks(config: EngineConfig) -> NetworkRanks:
    """The ranks of an engine, as actors. Raises InvalidParameterError, EngineStartError."""
    return NetworkRanks(config, RayLauncher(config))


def cpus_per_rank(cpus_of_nodes: list[int], num_ranks: int) -> int:
    """The most CPUs, at least 1, that every rank of all engines can have if no other program
    runs.
    """
    for num_cpus in range(max(cpus_of_nodes, default=1), 1, -1):
        if sum(cpus // num_cpus for cpus in cpus_of_nodes) >= num_ranks:
            return num_cpus
    return 1


def _lines(error: Exception) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def _connect(ray: Any) -> None:
    """Connects to the cluster that RAY_ADDRESS names, or that runs on this machine."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        _require_listener(os.environ.get("RAY_ADDRESS", ""))
        ray.init(address="auto", logging_level=logging.WARNING, log_to_driver=True)
    except OSError as error:
        raise InvalidParameterError(
            NAME,
            "ray needs a Ray cluster; start one with `ray start --head`, or name one with "
            f"RAY_ADDRESS=HOST:PORT ({str(error).splitlines()[0]})",
        ) from None
    finally:
        if is_main:  # Ray replaces the handler
            signal.signal(signal.SIGTERM, before)


def _require_listener(address: str) -> None:
    """Raises OSError where nothing listens: Ray would try for many minutes."""
    if "://" in address:
        raise ConnectionError(f"RAY_ADDRESS={address} is not an address of a cluster's node")
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConnectionError(f"RAY_ADDRESS={address}: {error}") from None
