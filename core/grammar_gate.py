"""Holds requests whose grammar is being checked; then they take their place in order of arrival.

Must not know: grammars, the scheduler, sockets.

    add ──▶ waiting ──(a check completes, in some thread)──▶ checked ──▶ take, between two steps
                    ──(its deadline passes)────────────────▶ late ─────▶

There is no polling: a completed check calls `wake`, which ends the wait of the engine's host, and
the host waits no longer than until `next_deadline`; `wait` is for a caller that runs steps itself.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ..ipc.errors import InvalidParameterError
from ..ipc.messages import EngineCoreRequest


@dataclass(slots=True, eq=False)
class GatedRequest:
    request: EngineCoreRequest
    client_index: int
    arrival: int  # its place in the scheduler's order
    check: Future
    # the time spent here is part of its time in the queue
    queued_time: float = field(default_factory=lambda: time.monotonic())
    # completions to abort as soon as the scheduler has them
    aborted_ids: list[str] = field(default_factory=list)

    @property
    def is_late(self) -> bool:
        return bool(self.request.deadline) and self.request.deadline <= time.monotonic()

    @property
    def error(self) -> BaseException | None:
        """Why it ends, if so: an InvalidParameterError about its grammar, or a check that failed by
        itself, which is not the request's fault. None while the check runs.
        """
        if not self.check.done():
            return None
        if self.check.cancelled():
            return RuntimeError("the check of its grammar was cancelled")
        error = self.check.exception()
        if error is None or isinstance(error, InvalidParameterError):
            return error
        return RuntimeError(f"its grammar could not be checked: {error}")


class GrammarGate:
    """Owned and called by the thread that runs steps; only completions of checks come from
    others.
    """

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

    def add(
        self, request: EngineCoreRequest, client_index: int, arrival: int, check: Future
    ) -> None:
        gated = GatedRequest(request, client_index, arrival, check)
        self._waiting[request.request_id] = gated
        if check.done():  # a known grammar: there is no wait to end
            self._ready.append(gated)
        else:
            check.add_done_callback(lambda _: self._on_checked(gated))

    def _on_checked(self, gated: GatedRequest) -> None:
        self._checked.put(gated)
        self.wake()

    @property
    def next_deadline(self) -> float | None:
        """By time.monotonic(), of the requests that wait here."""
        if not self._waiting:
            return None
        return min(
            (gated.request.deadline for gated in self if gated.request.deadline), default=None
        )

    def has_checked(self) -> bool:
        """Whether there is a request to take."""
        if not self._waiting:  # what is left of others is dropped with the next `take`
            return False
        return bool(self._ready) or not self._checked.empty() or any(g.is_late for g in self)

    def take(self) -> list[GatedRequest]:
        """Removes and returns the requests whose check is done, and those whose deadline has
        passed.
        """
        while not self._checked.empty():
            self._ready.append(self._checked.get())
        self._ready.extend(g for g in self if g.is_late and g not in self._ready)
        taken = [
            gated for gated in self._ready if self._waiting.get(gated.request.request_id) is gated
        ]
        self._ready.clear()
        for gated in taken:
            del self._waiting[gated.request.request_id]
        return taken

    def wait(self) -> None:
        """Blocks until there is a request to take. Call it only while a request waits here."""
        deadline = self.next_deadline
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._ready:
            with contextlib.suppress(Empty):
                self._ready.append(self._checked.get(timeout=timeout_s))

    def abort(self, request_ids: list[str], client_index: int) -> list[GatedRequest]:
        """Removes this client's requests among `request_ids`.

        The abort of one of several completions is recorded.
        """
        taken = []
        for request_id in request_ids:
            gated = self._waiting.get(request_id)
            if gated is not None and gated.client_index == client_index:
                taken.append(self._waiting.pop(request_id))
            elif gated is None:
                parent = self._waiting.get(request_id.partition("_")[2])  # see child_request_id
                if parent is not None and parent.client_index == client_index:
                    parent.aborted_ids.append(request_id)
        return taken

    def drop_client(self, client_index: int) -> int:
        """The client is gone. Returns how many of its requests waited here; their checks are
        ignored.
        """
        mine = [
            request_id
            for request_id, gated in self._waiting.items()
            if gated.client_index == client_index
        ]
        for request_id in mine:
            del self._waiting[request_id]
        return len(mine)

    def is_used_by(self, client_index: int) -> bool:
        return any(gated.client_index == client_index for gated in self._waiting.values())

    def check_integrity(self, scheduled: Container[str]) -> None:
        """Raises AssertionError if a request is both here and in the scheduler, or waits for
        nothing.
        """
        both = [request_id for request_id in self._waiting if request_id in scheduled]
        forgotten = [
            gated.request.request_id
            for gated in self
            if gated.check.done() and not self.has_checked()
        ]
        if both or forgotten:
            raise AssertionError(
                f"waiting for their grammar and scheduled: {both}; forgotten: {forgotten}"
            )
