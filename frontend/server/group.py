"""Several server processes that share one listening socket and one engine, or several: starts them,
replaces those that die, and ends all of them.

Must not know: HTTP, requests, what a server counts.

    this process ── listening socket ──▶ server 1 ┐
         │       └───────────────────────▶ server 2 ┴─ attached ─▶ engines (a daemon)
         └── starts, watches, ends ──▶ all of these, which are its children

A connection goes to one of the servers that wait for one; those that are not accepted yet stay when
a server dies. The kernel ends every child when this process dies.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ...ipc.config import EngineConfig, ServiceConfig, config_fields
from ...ipc.errors import EngineStartError, InvalidParameterError, QuireError
from ...ipc.process import SignalPipe
from ...ipc.systemd import Notices
from ..requests.input_processor import derive_seed
from ..supervision.children import ENDS, Child, wait_for_end, wait_for_news
from ..supervision.engine_processes import EngineProcesses
from ..supervision.restart_budget import RestartBudget
from ..supervision.socket_folder import SocketFolder
from .config import ServerConfig
from .totals import end_totals

FAILED_S = 5.0  # for the servers to end after an engine has failed
LONGEST_NAME = "server-1000-1000000.notices"
# The settings that need one process: what they change or keep is in that process only.
OF_ONE_SERVER = {
    "admin": "its routes change one server's view of the engine",
    "page": "it shows requests of one server",
    "allow_model_changes": "models come and go in one server",
    "max_stored_responses": "responses are kept in one server",
}


class MemberSettings(msgspec.Struct, frozen=True):
    """What a server process reads from its stdin."""

    config: ServerConfig
    arguments: dict[str, Any]  # of EngineArgs, those that a program attached to a daemon may choose
    engine: str  # the daemon's address
    model_name: str
    listener_fd: int
    folder: str  # of the group's sockets and counts
    name: str
    waits: bool  # accepts no connection before it is ready, since another server is


def config_of_members(config: ServerConfig, given: Mapping[str, Any]) -> ServerConfig:
    """Returns the settings of each server of a group. Raises InvalidParameterError for those that
    need one process, among the settings `given`.
    """
    for name, why in OF_ONE_SERVER.items():
        if given.get(name):
            raise InvalidParameterError(name, f"needs api_server_count=1: {why}")
    return msgspec.structs.replace(
        config,
        page=False,
        max_stored_responses=0,
        max_connections=config.share(config.max_connections),
    )


class ServerGroup:
    """Runs until a signal, or until a process cannot be started any more; `run` raises its error.

    config: of each server. engine_configs: resolved, of each engine; none: `engine` is the address
    of a daemon that somebody else runs. arguments: see MemberSettings. command: starts another
    program as engine (see EngineProcesses).

    Raises InvalidParameterError if the folder of temporary files is no place for sockets.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine_configs: Sequence[EngineConfig],
        engine: str,
        arguments: dict[str, Any],
        listener: socket.socket,
        model_name: str,
        *,
        command: Sequence[str] | None = None,
    ):
        self._config = config
        self._arguments = arguments
        self._seed = arguments.get("seed", config_fields()["seed"].default)
        self._listener = listener
        self._model_name = model_name
        self._folder = SocketFolder("quire-servers-", LONGEST_NAME)
        self._engines: EngineProcesses | None = None
        self._address = engine
        if engine_configs:
            self._address = f"ipc://{self._folder.path}/engine"
            self._engines = EngineProcesses(
                engine_configs, self._address, self._folder.path, command
            )
        most = ServiceConfig().engine_restarts
        self._servers = [
            Child(f"server-{i}", f"server process {i}", RestartBudget(most))
            for i in range(1, config.api_server_count + 1)
        ]
        self._is_draining = False
        self._is_interrupted = False
        self._failure: QuireError | None = None

    def run(self, tell: Any) -> None:
        """Raises KeyboardInterrupt at the end if SIGINT has begun it."""
        signals = SignalPipe(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        has_told = False
        try:
            while self._failure is None and not self._is_over():
                self._start_due()
                if self._failure is None:
                    for number in wait_for_news(self._children, signals, self._due_at()):
                        self._on_signal(number)
                    self._look()
                if not has_told and all(server.is_ready for server in self._servers):
                    has_told = True
                    tell(f"ready: {self._model_name}, {len(self._servers)} server processes")
        finally:
            self._end(signals)
        if self._failure is not None:
            raise self._failure
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _is_over(self) -> bool:
        return self._is_draining and all(server.process is None for server in self._servers)

    @property
    def _children(self) -> list[Child]:
        return [*([] if self._engines is None else self._engines.children), *self._servers]

    def _due_at(self) -> float:
        # while all drain, a server that has ended is not started again
        servers = [one for one in self._servers if one.process is not None or not self._is_draining]
        due = [server.due_at for server in servers]
        return min(due + ([] if self._engines is None else [self._engines.due_at]))

    # ------------------------------------------------------------ starts

    def _start_due(self) -> None:
        if self._engines is not None:
            self._failure = self._engines.start_due()
        if self._is_draining:
            return
        for server in self._servers:
            is_due = server.process is None and time.monotonic() >= server.start_at
            if is_due and self._failure is None:
                self._failure = self._start_server(server)

    def _start_server(self, server: Child) -> QuireError | None:
        name = f"{server.name}-{server.num_starts}"
        # each process numbers its requests from zero, and draws from a sequence of its own
        seed = derive_seed(self._seed, sum(one.num_starts for one in self._servers))
        settings = MemberSettings(
            self._config,
            self._arguments | {"seed": seed},
            self._address,
            self._model_name,
            self._listener.fileno(),
            str(self._folder.path),
            name,
            waits=any(one.is_ready for one in self._servers),
        )
        return server.start(
            partial(Notices, self._folder.path / f"{name}.notices"),
            [sys.executable, "-P", "-m", "quire.frontend.server.member"],
            msgspec.json.encode(settings),
            # Unlike an engine it needs keys and tokens, which are also in this process's variables.
            os.environ,
            [self._listener.fileno()],
        )

    # ------------------------------------------------------------ events

    def _on_signal(self, number: int) -> None:
        """The first SIGTERM or SIGINT drains the servers, the second ends them at once. A server
        that starts reads the keys anyway.
        """
        if number in ENDS:
            self._is_interrupted |= number == signal.SIGINT
            number = signal.SIGKILL if self._is_draining else signal.SIGTERM
            self._is_draining = True
        for server in self._servers:
            if server.process is not None and (server.is_ready or number != signal.SIGHUP):
                server.process.send_signal(signal.Signals(number))

    def _look(self) -> None:
        """Notices processes that have died or hang, the engines first."""
        if self._engines is not None:
            self._failure = self._engines.look(is_draining=self._is_draining)
        for server in self._servers:
            if self._failure is None and server.has_died():
                self._on_server_death(server)

    def _on_server_death(self, server: Child) -> None:
        is_first = server.num_starts == 1 and not server.is_ready
        name = f"{server.name}-{server.num_starts - 1}"
        how = server.clear()
        end_totals(self._folder.path, name)
        if self._is_draining:
            return
        if is_first:
            self._failure = EngineStartError(how)
        else:
            self._failure = server.restart(how.partition(";")[0])

    # ------------------------------------------------------------ the end

    def _end(self, signals: SignalPipe) -> None:
        """Ends all processes: the servers first, since they use the engines. A signal makes it
        short.
        """
        for server in self._servers:
            if server.process is not None:
                server.process.send_signal(signal.SIGTERM)
        wait_for_end(self._servers, signals, FAILED_S)
        if self._engines is not None:
            self._engines.end(signals)
        self._folder.remove()
