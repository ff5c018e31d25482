"""Owner is the process that made a client. Guard admits one of its threads at a time, until the
client is closed.

Must not know: the calls, how a client connects to its engine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType

from ...ipc.errors import EngineDeadError, EngineUsageError

_num_forks = 0  # between the first process and this one


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Owner:
    """The process that makes this object. Sockets and threads do not survive a fork of it."""

    def __init__(self) -> None:
        self._owner_pid, self._num_forks = os.getpid(), _num_forks

    @property
    def is_in_fork(self) -> bool:
        return _num_forks != self._num_forks

    def check_process(self) -> None:
        """Raises EngineUsageError in a fork of the owning process."""
        if self.is_in_fork:
            raise EngineUsageError(
                f"this engine belongs to process {self._owner_pid}, and process {os.getpid()} is a "
                f"fork of it: create the LLM in the process that uses it, or let multiprocessing "
                f'start processes with the method "spawn"'
            )


class Guard(Owner):
    """Use `with guard:` around every call. Calls of one thread may nest.

    With `waits` a second thread waits for its turn; otherwise it gets EngineUsageError. In a fork
    of the owning process every call raises EngineUsageError.
    """

    def __init__(self, *, waits: bool = False):
        super().__init__()
        self._waits = waits
        self._lock = threading.RLock()
        self._depth = 0  # nesting depth of the calls of the thread that holds the lock
        self._closed: EngineDeadError | None = None
        self._close_later: Callable[[], object] | None = None

    def __enter__(self) -> None:
        if _num_forks != self._num_forks:  # written out: every call of a client comes here
            self.check_process()
        if not self._lock.acquire(blocking=self._waits):
            raise self._closed or EngineUsageError(
                "another thread is in a call of this engine: LLMEngine and its clients serve one "
                "thread at a time (calls of LLM wait, AsyncLLM runs requests concurrently)"
            )
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        try:
            if self._depth == 0 and self._close_later is not None:
                close, self._close_later = self._close_later, None
                close()
        finally:
            self._lock.release()

    def close(self, function: Callable[[], object], cause: str) -> None:
        """Calls function() when no call is in progress.

        Waits for another thread's call, which the caller must have interrupted. Inside a call of
        this thread (a signal handler, a progress bar's callback) the function runs when that call
        ends.
        """
        self._closed = self._closed or EngineDeadError(cause)
        with self._lock:
            if self._depth:
                self._close_later = function
            else:
                function()
