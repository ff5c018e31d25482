"""Child is one process of a group and the next one in its place; functions wait for several.

Must not know: what a process does, when it is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from ...ipc.errors import EngineStartError, QuireError
from ...ipc.process import STACKS_SIGNAL, ChildProcess, SignalPipe, file_with
from ...ipc.systemd import Notices
from .restart_budget import RestartBudget

logger = logging.getLogger("quire.supervision")
KEY = b"k"  # a child reads one, and these need no secret
STACKS_S = 0.5  # for a hung process to write the stacks of its threads
KILLED_S = 5.0  # for the kernel to end a process that is killed
MAX_WAIT_S = 3600.0  # poll takes no longer time than some weeks
ENDS = frozenset({signal.SIGTERM, signal.SIGINT})


class Child:
    """One process of the group, and the next one in its place."""

    def __init__(self, name: str, title: str, budget: RestartBudget):
        self.name = name
        self.title = title  # of its process in messages
        self.budget = budget
        self.process: ChildProcess | None = None
        self.notices: Notices | None = None
        self.start_at = 0.0  # if there is no process, by time.monotonic()
        self.num_starts = self.num_failed = 0
        self.facts: dict[str, str] = {}  # that its processes have reported
        self._is_noted = False  # that it is ready

    @property
    def is_ready(self) -> bool:
        return self.notices is not None and self.notices.is_ready

    @property
    def due_at(self) -> float:
        """When something is to be done about it, unless it reports or dies before."""
        return self.start_at if self.notices is None else self.notices.late_at

    def start(
        self,
        make_notices: Callable[[], Notices],
        command: Sequence[str],
        data: bytes,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> QuireError | None:
        """Starts its next process, which reads `data` from its stdin, and what it reports.

        Returns an error if it cannot be started, and is not tried again: the first time, or too
        often.
        """
        with contextlib.ExitStack() as undo:
            try:
                notices = make_notices()
                undo.callback(notices.close)
                stdin = file_with(data)
                try:
                    process = ChildProcess(
                        command,
                        KEY,
                        name=self.title,
                        pass_fds=pass_fds,
                        stdin=stdin,
                        environment=dict(environment) | notices.environment,
                    )
                finally:
                    os.close(stdin)
            except OSError as error:  # no descriptor, process, memory or space, for now
                self.num_failed += 1
                how = f"{self.title} cannot be started: {error}"
                return EngineStartError(how) if not self.num_starts else self.restart(how)
            undo.pop_all()
        self.process, self.notices = process, notices
        self.num_starts += 1
        self._is_noted = False
        return None

    def start_in(self, delay_s: float) -> None:
        """Sets when the next process is started."""
        self.start_at = time.monotonic() + delay_s

    def restart(self, how: str, error: type[QuireError] = QuireError) -> QuireError | None:
        """Sets when the next process is started. Returns an error if there have been too many."""
        delay_s = self.budget.take(num_failed=self.num_failed)
        if delay_s is None:
            return error(
                f"{how} (it is not started again: {self.budget.max_restarts} restarts in 10 "
                f"minutes are allowed, or as many that fail)"
            )
        logger.error("%s; starting it again in %g s", how, delay_s)
        self.start_in(delay_s)
        return None

    def read_notices(self) -> None:
        """Notes what the process reports, and once that it is ready."""
        if self.notices is None:
            return
        self.notices.read()
        self.facts |= self.notices.facts
        if self.is_ready and not self._is_noted:
            self._is_noted, self.num_failed = True, 0
            self.budget.note_progress()

    def has_died(self) -> bool:
        return self.process is not None and self.process.wait(0.0)

    def is_over(self) -> bool:
        """Whether there is no process, or a dead one."""
        return self.process is None or self.process.wait(0.0)

    def end_if_late(self, start_limit_s: float, step_limit_s: float) -> None:
        """Kills a process that was not ready, or has not finished a step, in time."""
        if self.process is None or self.notices is None or time.monotonic() < self.notices.late_at:
            return
        problem = "was not ready within %g s (startup_timeout_s)"
        if self.is_ready:
            problem = "has not finished a step for %g s (step_timeout_s)"
        logger.error(
            f"%s (pid %d) {problem}; the stacks of its threads follow, if it can still write them, "
            f"and then it is ended",
            self.title,
            self.process.pid,
            step_limit_s if self.is_ready else start_limit_s,
        )
        self.process.send_signal(STACKS_SIGNAL)
        self.process.wait(STACKS_S)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(KILLED_S)

    def clear(self) -> str:
        """Reaps a dead process, and returns how it died."""
        assert self.process is not None and self.notices is not None
        how = self.process.describe_death()
        self.num_failed += not self.is_ready
        self.process.close(0.0)
        self.notices.close()
        self.process = self.notices = None
        return how


def wait_for_news(children: Sequence[Child], signals: SignalPipe, until: float) -> bytes:
    """Waits for a signal, a report or a death, or for `until` by time.monotonic(). Reads reports,
    and returns the signals.
    """
    poller = select.poll()
    poller.register(signals.read_fd, select.POLLIN)
    for child in children:
        if child.process is not None and child.notices is not None:
            poller.register(child.process.pidfd, select.POLLIN)
            poller.register(child.notices.fileno(), select.POLLIN)
    wait_s = min(MAX_WAIT_S, max(0.0, until - time.monotonic()))
    poller.poll(math.ceil(wait_s * 1000))
    for child in children:
        child.read_notices()
    return signals.read()


def wait_for_end(children: Sequence[Child], signals: SignalPipe, timeout_s: float) -> None:
    """Waits until all have ended. Kills those that have not after `timeout_s`, or at SIGTERM or
    SIGINT.
    """
    deadline = time.monotonic() + timeout_s
    while alive := [one for one in children if not one.is_over()]:
        if ENDS.intersection(wait_for_news(alive, signals, deadline)):
            break
        if time.monotonic() >= deadline:
            break
    for child in alive:
        assert child.process is not None
        child.process.send_signal(signal.SIGKILL)
    for child in children:
        if child.process is not None:
            child.clear()
