"""PlacedRequests knows on which replica each unfinished request is, and what it adds to the load
there. JournalPart is the part of the session's journal that a replica has.

Must not know: clients, how a request travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....ipc.messages import BACKGROUND_WEIGHT, EngineCoreRequest, child_request_id
from ...supervision.resubmission import PROBATION_TOKENS
from ..journal import Entry, Journal
from .routing import Load, Router, prefix_keys


@dataclass(slots=True, eq=False)
class Placed:
    load: Load
    left: set[str]  # the engine ids of completions that have not ended
    # This is the number of output tokens when it came here from a dead replica, or None if it has
    # not moved.
    num_moved_tokens: int | None = None


class PlacedRequests:
    def __init__(self, router: Router):
        self.router = router
        self._placed: dict[str, Placed] = {}  # by engine id
        # It holds the completions of a request with n > 1 that have moved, which are requests of
        # their own.
        self._children: dict[str, list[str]] = {}

    def place(
        self,
        request: EngineCoreRequest,
        replica: int | None = None,
        *,
        num_moved_tokens: int | None = None,
    ) -> int:
        """Chooses the replica of a request, unless it is given."""
        token_ids = request.prompt_token_ids
        if request.resume_tokens:
            token_ids = token_ids + request.resume_tokens
        lora = request.lora_request
        salt = (request.cache_salt, None if lora is None else lora.lora_int_id)
        load = self.router.place(
            prefix_keys(token_ids, salt),
            len(token_ids),
            request.owner,
            request.num_completions,
            replica,
            request.owner_weight or BACKGROUND_WEIGHT,
        )
        request_id, number = request.request_id, request.num_completions
        left = {request_id}
        if number > 1:
            left = {child_request_id(request_id, index) for index in range(number)}
        self._placed[request_id] = Placed(load, left, num_moved_tokens)
        return load.replica

    def find(self, request_id: str) -> Placed | None:
        """Returns where a request, or one of its completions, is (see child_request_id)."""
        return self._placed.get(request_id) or self._placed.get(request_id.partition("_")[2])

    def replica_of(self, request_id: str) -> int | None:
        placed = self.find(request_id)
        return None if placed is None else placed.load.replica

    def begin(self, request_id: str) -> None:
        """Notes that a request has its first token."""
        if (placed := self.find(request_id)) is not None:
            self.router.begin(placed.load)

    def end(self, request_id: str) -> None:
        """Notes that a request, or one of its completions, has ended."""
        if (placed := self._placed.get(request_id)) is not None:
            self._remove(request_id, len(placed.left))
            return
        parent = request_id.partition("_")[2]
        placed = self._placed.get(parent)
        if placed is None or request_id not in placed.left:
            return
        if len(placed.left) == 1:
            self._remove(parent, 1)
        else:
            placed.left.discard(request_id)
            self.router.end(placed.load, 1, is_last=False)

    def _remove(self, request_id: str, num_left: int) -> None:
        self.router.end(self._placed.pop(request_id).load, num_left)
        parent = request_id.partition("_")[2]
        if request_id in (children := self._children.get(parent, [])):
            children.remove(request_id)
            if not children:
                del self._children[parent]

    def abort(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Removes requests. Returns the ids to abort on each replica."""
        aborts: dict[int, list[str]] = {}
        for key in request_ids:
            for request_id in (key, *self._children.get(key, ())):
                if (replica := self.replica_of(request_id)) is not None:
                    aborts.setdefault(replica, []).append(request_id)
                    self.end(request_id)
        return aborts

    def is_suspect(self, entry: Entry) -> bool:
        """Returns whether its replica died, and now the one it moved to, without progress in
        between.
        """
        placed = self.find(entry[0].request_id)
        return (
            placed is not None
            and placed.num_moved_tokens is not None
            and len(entry[1]) < placed.num_moved_tokens + PROBATION_TOKENS
        )

    def release(self, entries: Sequence[Entry]) -> None:
        """Removes requests from their replica. Each completion is a request of its own now."""
        for request, _ in entries:
            request_id = request.request_id
            parent = request_id.partition("_")[2]
            if request_id in self._placed:
                placed = self._placed.pop(request_id)
                self.router.end(placed.load, len(placed.left))
            elif (placed := self._placed.get(parent)) is not None:
                self._children.setdefault(parent, []).append(request_id)
                placed.left.discard(request_id)
                self.router.end(placed.load, 1, is_last=not placed.left)
                if not placed.left:
                    del self._placed[parent]


class JournalPart(Journal):
    """The requests of a journal that are on one replica."""

    def __init__(self, whole: Journal, placed: PlacedRequests, replica: int):
        self._whole, self._placed, self._replica = whole, placed, replica

    def __bool__(self) -> bool:
        return self._placed.router.num_requests(self._replica) > 0

    def entries(self) -> list[Entry]:
        replica_of = self._placed.replica_of
        return [e for e in self._whole.entries() if replica_of(e[0].request_id) == self._replica]
