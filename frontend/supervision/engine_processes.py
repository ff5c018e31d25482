"""EngineProcesses starts the engines to which other programs attach, replaces those that die or
hang, and ends all of them.

Must not know: requests, clients, who attaches.

    this process ── binds PATH, PATH.1, … ──▶ engine 0, engine 1, … accept there

The listeners belong to this process and outlive an engine: a program that attaches meanwhile waits
for the next one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.errors import EngineDeadError, EngineStartError, QuireError
from ...ipc.listener import bind_listener
from ...ipc.process import LEAVE_SIGNAL, SignalPipe, engine_command, engine_environment
from ...ipc.socket_files import SocketFile
from ...ipc.sockets import ipc_path, replica_address
from ...ipc.systemd import NUM_BLOCKS, Notices
from .children import Child, wait_for_end
from .restart_budget import RestartBudget

START_AGAIN_S = 1.0  # before one that leaves or dies while all end is started for what is left


class EngineProcesses:
    """One engine for each of `configs`, which are resolved, at `address` and those that
    replica_address makes of it. folder: for the sockets of this process. command: starts another
    program instead of the engine (see engine_proc.main).

    Raises InvalidParameterError if an address cannot be bound.
    """

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        address: str,
        folder: Path,
        command: Sequence[str] | None = None,
    ):
        self.service = service = configs[0].service_config
        self._configs = configs
        self._folder = folder
        self._command = command
        self._is_replaced = service.on_engine_death == "restart"
        self._addresses = [replica_address(address, index) for index in range(len(configs))]
        self._listeners: list[socket.socket] = []
        self._files: list[SocketFile] = []
        try:
            for one in self._addresses:
                is_for_all = service.token_file is not None
                self._listeners.append(bind_listener(one, is_for_all_users=is_for_all))
                self._files.append(SocketFile(ipc_path(one)))
        except BaseException:
            self.stop_listening()
            raise
        self.children = [
            Child(
                f"engine-{index}",
                "the engine process" if len(configs) == 1 else f"the process of engine {index}",
                RestartBudget(service.engine_restarts),
            )
            for index in range(len(configs))
        ]

    @property
    def are_ready(self) -> bool:
        return all(child.is_ready for child in self.children)

    @property
    def due_at(self) -> float:
        """When `start_due` or `look` has something to do, unless something happens before."""
        return min(child.due_at for child in self.children)

    def start_due(self) -> QuireError | None:
        """Starts those whose time has come. Returns why one cannot be started any more."""
        for index, child in enumerate(self.children):
            if child.process is None and time.monotonic() >= child.start_at:
                if (failure := self._start(index, child)) is not None:
                    return failure
        return None

    def _start(self, index: int, child: Child) -> QuireError | None:
        config = self._configs[index]
        if NUM_BLOCKS in child.facts:  # as many as the first one, so that what fitted fits again
            num_blocks = int(child.facts[NUM_BLOCKS])
            cache = msgspec.structs.replace(config.cache_config, num_gpu_blocks_override=num_blocks)
            config = msgspec.structs.replace(config, cache_config=cache)
        listener_fd = self._listeners[index].fileno()
        # A later engine has a higher epoch, also one of another program at this address.
        epoch = time.monotonic_ns() // 1_000_000
        return child.start(
            partial(
                Notices,
                self._folder / f"{child.name}.notices",
                self.service.step_timeout_s,
                self.service.startup_timeout_s,
            ),
            [
                *engine_command(listen=self._addresses[index], program=self._command),
                *("--listener-fd", str(listener_fd), "--epoch", str(epoch)),
            ],
            msgspec.json.encode(config),
            engine_environment(),
            [listener_fd],
        )

    def look(self, *, is_draining: bool) -> QuireError | None:
        """Notices engines that have died or hang. Returns why one is not replaced. is_draining:
        one that ends is started again only after a moment, for requests that are left.
        """
        for child in self.children:
            child.end_if_late(self.service.startup_timeout_s, self.service.step_timeout_s)
            if child.has_died() and (failure := self._on_death(child, is_draining)) is not None:
                return failure
        return None

    def _on_death(self, child: Child, is_draining: bool) -> QuireError | None:
        is_first = child.num_starts == 1 and not child.is_ready
        how = child.clear()
        if is_first and not is_draining:
            return EngineStartError(how)
        if not self._is_replaced:
            return EngineDeadError(how)
        if is_draining:
            child.start_in(START_AGAIN_S)
            return None
        return child.restart(how, EngineDeadError)

    def leave(self) -> None:
        """Asks all to end: at the first call when their requests have ended, at the second at
        once.
        """
        for child in self.children:
            if child.process is not None:
                child.process.send_signal(LEAVE_SIGNAL)

    def stop_listening(self) -> None:
        """Removes the addresses, the first one last. May be called twice."""
        while self._files:
            self._files.pop().remove()
        while self._listeners:
            self._listeners.pop().close()

    def end(self, signals: SignalPipe) -> None:
        """Ends all, and returns when they are gone. A signal makes it short."""
        self.stop_listening()
        self.leave()
        wait_for_end(self.children, signals, self.service.shutdown_timeout_s)
