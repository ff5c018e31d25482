"""Several server processes that share one listening socket and one engine: starts them, replaces
those that die, and ends all of them.

Must not know: HTTP, requests, what a server counts.

    this process ── listening socket ──▶ server 1 ┐
         │       └───────────────────────▶ server 2 ┴─ attached ─▶ engine (a daemon)
         └── starts, watches, ends ──▶ all of these, which are its children

A connection goes to one of the servers that wait for one; those that are not accepted yet stay when
a server dies. The kernel ends every child when this process dies.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.config import EngineConfig, ServiceConfig, config_fields
from ...ipc.errors import EngineDeadError, EngineStartError, InvalidParameterError, QuireError
from ...ipc.listener import listener_pid
from ...ipc.process import (
    STACKS_SIGNAL,
    ChildProcess,
    SignalPipe,
    engine_command,
    engine_environment,
    file_with,
)
from ...ipc.sockets import ipc_path
from ...ipc.systemd import Notices
from ..requests.input_processor import derive_seed
from ..supervision.restart_budget import RestartBudget
from .config import ServerConfig
from .totals import end_totals

logger = logging.getLogger(__name__)
KEY = b"k"  # a child reads one, and these need no secret
POLL_S = 0.05  # between two looks at the engine's socket file while it starts
STACKS_S = 0.5  # for a hung engine to write the stacks of its threads
MAX_WAIT_S = 3600.0  # poll takes no longer time than some weeks
FAILED_S = 5.0  # for the servers to end after the engine has failed
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


class Child:
    """One process of the group, and the next one in its place."""

    def __init__(self, name: str, title: str, budget: RestartBudget):
        self.name = name
        self.title = title  # of its process in messages
        self.budget = budget
        self.process: ChildProcess | None = None
        self.notices: Notices | None = None
        self.start_at = 0.0  # if there is no process, by time.monotonic(); inf: never
        self.num_starts = self.num_failed = 0
        self.is_noted = False  # that it is ready

    @property
    def is_ready(self) -> bool:
        return self.notices is not None and self.notices.is_ready

    def take(self, process: ChildProcess, notices: Notices) -> None:
        self.process, self.notices = process, notices
        self.num_starts += 1
        self.is_noted = False

    def start_in(self, delay_s: float) -> None:
        """Sets when the next process is started."""
        self.start_at = time.monotonic() + delay_s

    def note_ready(self) -> None:
        """Notes that the process is ready, once."""
        if self.is_ready and not self.is_noted:
            self.is_noted, self.num_failed = True, 0
            self.budget.note_progress()

    def clear(self) -> str:
        """Reaps a dead process, and returns how it died."""
        assert self.process is not None and self.notices is not None
        how = self.process.describe_death()
        self.num_failed += not self.is_ready
        self.process.close(0.0)
        self.notices.close()
        self.process = self.notices = None
        return how


class ServerGroup:
    """Runs until a signal, or until a process cannot be started any more; `run` raises its error.

    config: of each server. engine_config: resolved, of the engine; None: `engine` is the address of
    a daemon that somebody else runs. arguments: see MemberSettings.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig | None,
        engine: str,
        arguments: dict[str, Any],
        listener: socket.socket,
        model_name: str,
    ):
        self._config = config
        self._engine_config = engine_config
        self._arguments = arguments
        self._seed = arguments.get("seed", config_fields()["seed"].default)
        self._listener = listener
        self._model_name = model_name
        self._folder = Path(tempfile.mkdtemp(prefix="quire-servers-"))
        service = ServiceConfig() if engine_config is None else engine_config.service_config
        self._service = service
        self._is_replaced = service.on_engine_death == "restart"
        self._address = engine if engine_config is None else f"ipc://{self._folder}/engine"
        self._engine = Child("engine", "the engine process", RestartBudget(service.engine_restarts))
        if engine_config is None:
            self._engine.start_in(math.inf)
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
                self._wait(signals)
                self._look()
                if not has_told and all(server.is_ready for server in self._servers):
                    has_told = True
                    tell(f"ready: {self._model_name}, {len(self._servers)} server processes")
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _is_over(self) -> bool:
        return self._is_draining and all(server.process is None for server in self._servers)

    # ------------------------------------------------------------ starts

    def _start_due(self) -> None:
        now = time.monotonic()
        if self._engine.process is None and now >= self._engine.start_at:
            self._start_engine()
        if self._is_draining or not self._has_engine():
            return
        for server in self._servers:
            if server.process is None and now >= server.start_at:
                self._start_server(server)

    def _has_engine(self) -> bool:
        """Whether servers may attach: the engine listens while it loads."""
        return self._engine_config is None or (
            self._engine.process is not None
            and listener_pid(ipc_path(self._address)) == self._engine.process.pid
        )

    def _start_engine(self) -> None:
        data = msgspec.json.encode(self._engine_config)
        notices = Notices(self._folder / "engine.notices", self._service.step_timeout_s)
        command = engine_command(listen=self._address)
        environment = engine_environment() | notices.environment
        self._start(self._engine, notices, command, data, environment)

    def _start_server(self, server: Child) -> None:
        name = f"{server.name}-{server.num_starts}"
        # each process numbers its requests from zero, and draws from a sequence of its own
        seed = derive_seed(self._seed, sum(one.num_starts for one in self._servers))
        settings = MemberSettings(
            self._config,
            self._arguments | {"seed": seed},
            self._address,
            self._model_name,
            self._listener.fileno(),
            str(self._folder),
            name,
        )
        notices = Notices(self._folder / f"{name}.notices")
        command = [sys.executable, "-P", "-m", "quire.frontend.server.member"]
        # Unlike an engine it needs keys and tokens, which are also in this process's variables.
        environment = dict(os.environ) | notices.environment
        data = msgspec.json.encode(settings)
        self._start(server, notices, command, data, environment, self._listener.fileno())

    def _start(
        self,
        child: Child,
        notices: Notices,
        command: list[str],
        data: bytes,
        environment: Mapping[str, str],
        *pass_fds: int,
    ) -> None:
        stdin = file_with(data)
        try:
            process = ChildProcess(
                command,
                KEY,
                name=child.title,
                pass_fds=pass_fds,
                stdin=stdin,
                environment=environment,
            )
        except BaseException:
            notices.close()
            raise
        finally:
            os.close(stdin)
        child.take(process, notices)

    # ------------------------------------------------------------ events

    @property
    def _children(self) -> list[Child]:
        return [self._engine, *self._servers]

    def _wait(self, signals: SignalPipe) -> None:
        """Waits until something happens, and handles signals and notices."""
        poller = select.poll()
        poller.register(signals.read_fd, select.POLLIN)
        is_starting = not self._is_draining and any(one.process is None for one in self._servers)
        until = time.monotonic() + POLL_S if is_starting else math.inf
        for child in self._children:
            if child.process is None:
                if child is self._engine or not self._is_draining:
                    until = min(until, max(child.start_at, time.monotonic() + POLL_S))
                continue
            assert child.notices is not None
            poller.register(child.process.pidfd, select.POLLIN)
            poller.register(child.notices.fileno(), select.POLLIN)
            until = min(until, child.notices.late_at)
        wait_s = None if until == math.inf else max(0.0, until - time.monotonic())
        poller.poll(None if wait_s is None else math.ceil(min(wait_s, MAX_WAIT_S) * 1000))
        for number in signals.read():
            self._on_signal(number)
        for child in self._children:
            if child.notices is not None:
                child.notices.read()
                child.note_ready()

    def _on_signal(self, number: int) -> None:
        """The first SIGTERM or SIGINT drains the servers, the second ends them at once. A server
        that starts reads the keys anyway.
        """
        if number in (signal.SIGTERM, signal.SIGINT):
            self._is_interrupted |= number == signal.SIGINT
            number = signal.SIGKILL if self._is_draining else signal.SIGTERM
            self._is_draining = True
        for server in self._servers:
            if server.process is not None and (server.is_ready or number != signal.SIGHUP):
                server.process.send_signal(signal.Signals(number))

    def _look(self) -> None:
        """Notices processes that have died or hang, the engine first."""
        engine = self._engine
        if engine.process is not None:
            assert engine.notices is not None
            if engine.process.wait(0.0):
                self._on_engine_death()
            elif time.monotonic() >= engine.notices.late_at:
                logger.error(
                    "the engine process (pid %d) has not finished a step for %g s "
                    "(step_timeout_s); the stacks of its threads follow, if it can still write "
                    "them, and then it is ended",
                    engine.process.pid,
                    self._service.step_timeout_s,
                )
                engine.process.send_signal(STACKS_SIGNAL)
                engine.process.wait(STACKS_S)
                engine.process.send_signal(signal.SIGKILL)
                engine.process.wait(FAILED_S)
                self._on_engine_death()
        for server in self._servers:
            if self._failure is None and server.process is not None and server.process.wait(0.0):
                self._on_server_death(server)

    def _on_engine_death(self) -> None:
        is_first = self._engine.num_starts == 1 and not self._engine.is_ready
        how = self._engine.clear()
        if is_first and not self._is_draining:
            self._failure = EngineStartError(how)
        elif not self._is_replaced:
            self._failure = EngineDeadError(how)
        elif self._is_draining:  # its requests continue, if the servers still have any
            self._engine.start_in(1.0)
        else:
            self._restart(self._engine, how, EngineDeadError)

    def _on_server_death(self, server: Child) -> None:
        is_first = server.num_starts == 1 and not server.is_ready
        name = f"{server.name}-{server.num_starts - 1}"
        how = server.clear()
        end_totals(self._folder, name)
        if self._is_draining:
            return
        if is_first:
            self._failure = EngineStartError(how)
        else:
            self._restart(server, how.partition(";")[0], QuireError)

    def _restart(self, child: Child, how: str, error: type[QuireError]) -> None:
        delay_s = child.budget.take(num_failed=child.num_failed)
        if delay_s is None:
            self._failure = error(
                f"{how} (it is not started again: {child.budget.max_restarts} restarts in 10 "
                f"minutes are allowed, or as many that fail)"
            )
            return
        logger.error("%s; starting it again in %g s", how, delay_s)
        child.start_in(delay_s)

    # ------------------------------------------------------------ the end

    def _end(self) -> None:
        """Ends all processes: the servers first, since they use the engine."""
        for child in self._servers:
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + FAILED_S
        for child in self._children[::-1]:
            if child.process is None:
                continue
            assert child.notices is not None
            timeout_s = max(0.0, deadline - time.monotonic())
            if child is self._engine:
                child.process.send_signal(signal.SIGTERM)
                timeout_s = self._service.shutdown_timeout_s
            child.process.close(timeout_s)
            child.notices.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)
