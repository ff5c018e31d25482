"""EngineDaemon is a daemon of several engines: it starts them, replaces those that die, and ends
all of them.

Must not know: requests; programs attach to the engines themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...ipc.config import EngineConfig
from ...ipc.errors import QuireError
from ...ipc.process import SignalPipe
from ...ipc.systemd import NUM_BLOCKS, Notifier
from .children import ENDS, wait_for_end, wait_for_news
from .engine_processes import EngineProcesses
from .socket_folder import SocketFolder


class EngineDaemon:
    """Runs until SIGTERM or SIGINT, or until an engine cannot be started any more.

    configs, address, command: as of EngineProcesses. Raises InvalidParameterError if the address
    cannot be bound.
    """

    def __init__(
        self, configs: Sequence[EngineConfig], address: str, command: Sequence[str] | None = None
    ):
        self._address = address
        self._folder = SocketFolder("quire-engines-", "engine-1000.notices")
        try:
            self._engines = EngineProcesses(configs, address, self._folder.path, command)
        except BaseException:
            self._folder.remove()
            raise
        self._num_signals = 0
        self._has_told = False

    def run(self) -> int:
        """Returns the exit code: 0 when all have finished their requests after a signal, 128 and
        its number after a second one. Raises QuireError if an engine cannot be started any more.
        """
        signals, notifier = SignalPipe(*ENDS), Notifier()
        children = self._engines.children
        failure: QuireError | None = None
        try:
            while failure is None and not self._num_signals:
                failure = self._engines.start_due()
                if failure is None:
                    until = min(self._engines.due_at, notifier.due)
                    self._num_signals += len(wait_for_news(children, signals, until))
                    failure = self._engines.look(is_draining=self._num_signals > 0)
                notifier.works()
                self._tell(notifier)
            if failure is None:
                return self._drain(signals, notifier)
        finally:
            self._engines.end(signals)
            self._folder.remove()
        raise failure

    def _tell(self, notifier: Notifier) -> None:
        """Tells once that all are ready."""
        if self._has_told or not self._engines.are_ready:
            return
        self._has_told = True
        sizes = [child.facts[NUM_BLOCKS] for child in self._engines.children]
        print(
            f"quire engine: ready at {self._address}, {len(sizes)} engines with "
            f"{', '.join(sizes)} KV-cache blocks",
            file=sys.stderr,
            flush=True,
        )
        notifier.ready()

    def _drain(self, signals: SignalPipe, notifier: Notifier) -> int:
        """Lets the engines finish their requests, whose programs then look for the next daemon."""
        self._engines.stop_listening()
        self._engines.leave()
        while alive := [one for one in self._engines.children if not one.is_over()]:
            numbers = wait_for_news(alive, signals, notifier.due)
            notifier.works()
            if numbers:
                self._engines.leave()
                wait_for_end(alive, signals, 0.0)
                return 128 + numbers[0]
        return 0


def run_daemon(configs: Sequence[EngineConfig], address: str) -> int:
    """Runs an EngineDaemon. Returns the exit code: of `run`, or 1 after saying what failed."""
    daemon = EngineDaemon(configs, address)
    try:
        return daemon.run()
    except QuireError as error:
        print(f"quire engine: {error}", file=sys.stderr)
        return 1
