"""Requests whose grammar is being checked: they wait here, and go on to the scheduler in the place in which they arrived.
May know: requests as messages, the futures of the executor's checks.
Must not know: grammars, the scheduler, sockets.

    add ──▶ waiting ──(a check is done, in some thread)──▶ checked ──▶ take, between two steps

Nobody polls: a finished check calls `wake`, which ends the wait of whoever steps the engine; `wait` is for a caller that steps it itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from ..ipc.messages import EngineCoreRequest


@dataclass(slots=True, eq=False)
class GatedRequest:
    request: EngineCoreRequest
    client_index: int
    arrival: int  # its place in the scheduler's order
    check: Future
    aborted_ids: list[str] = field(default_factory=list)  # of its completions, to be aborted as soon as the scheduler has them

    @property
    def error(self) -> BaseException | None:
        """Why it may not go on; only when its check is done."""
        return RuntimeError("the check was cancelled") if self.check.cancelled() else self.check.exception()


class GrammarGate:
    """Owned and called by the thread that steps the engine; only the ends of checks come from others."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None  # set by the host; called from any thread
        self._waiting: dict[str, GatedRequest] = {}  # in order of arrival
        self._checked: SimpleQueue[GatedRequest] = SimpleQueue()
        self._ready: deque[GatedRequest] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[GatedRequest]:
        return iter(self._waiting.values())

    def add(self, request: EngineCoreRequest, client_index: int, arrival: int, check: Future) -> None:
        gated = GatedRequest(request, client_index, arrival, check)
        self._waiting[request.request_id] = gated
        check.add_done_callback(lambda _: self._on_checked(gated))

    def _on_checked(self, gated: GatedRequest) -> None:
        self._checked.put(gated)
        self.wake()

    def has_checked(self) -> bool:
        return bool(self._ready) or not self._checked.empty()

    def take(self) -> list[GatedRequest]:
        """Those whose check is done; they are gone from here."""
        while not self._checked.empty():
            self._ready.append(self._checked.get())
        taken = [gated for gated in self._ready if self._waiting.get(gated.request.request_id) is gated]
        self._ready.clear()
        for gated in taken:
            del self._waiting[gated.request.request_id]
        return taken

    def wait(self) -> None:
        """Blocks until a check is done. Only while somebody waits here."""
        if not self._ready:
            self._ready.append(self._checked.get())

    def remove(self, request_id: str) -> GatedRequest:
        return self._waiting.pop(request_id)
