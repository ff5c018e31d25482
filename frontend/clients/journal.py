"""Journal holds the unfinished requests of a session, with their output tokens so far. A client
that replaces a dead engine submits them to the next one.

Must not know: text, clients, what a request asks for.
"""

from __future__ import annotations

from typing import Protocol

from ...ipc.messages import EngineCoreRequest

# A request and its output tokens so far.
Entry = tuple[EngineCoreRequest, list[int]]


class Unfinished(Protocol):
    """What a journal needs of a request's state."""

    def entries(self) -> list[Entry]:
        """Returns an entry for each unfinished completion, from which another engine can continue
        it.
        """
        ...


class Journal:
    """The session adds and removes requests; the client reads them. Its truth value says whether
    any is unfinished.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Unfinished] = {}  # by user id, in the order of arrival

    def __bool__(self) -> bool:
        return bool(self.requests)

    def entries(self) -> list[Entry]:
        return [entry for request in self.requests.values() for entry in request.entries()]
