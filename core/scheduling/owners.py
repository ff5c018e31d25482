"""The queue of waiting requests: fair between owners, in order within one.

Must not know: slots, blocks, the step being made.

An owner sends requests: it is a client, or one of those on whose behalf a client asks. The next
request to start is the first of the owner that has received the least service, in computed tokens
divided by its weight (the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024). Tokens are counted when they are computed, so that neither the length
of an output nor a hit in the prefix cache has to be predicted.

    owner a, 300 tokens    a4 a5 a6 a7 …  ┐
    owner b, 120 tokens    b1             ├─▶ next: b1, then c2, then a4 if b and c have no more
    owner c, 250 tokens    c2             ┘

With one owner this is one list, sorted by key.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from ...ipc.messages import BACKGROUND_WEIGHT
from ..request import Request, RequestOwner

_by_key = attrgetter("key")

# A second of a grammar's CPU time counts for as many tokens, which is about what a small model
# decodes in it. The usual 50 us per token hardly count then.
TOKENS_PER_S = 1000.0


class WaitingQueue:
    """Owns the owners of all unfinished requests, and the requests that wait to be started.

    Iteration is over the waiting requests of all owners, by key.
    """

    def __init__(self, max_debt: int, *, by_name: bool = False):
        """`max_debt`: an owner that begins to wait is at most this many tokens behind the others,
        however many it has received while no other owner waited. `by_name`: clients that name the
        same owner share it.
        """
        self.owners: dict[tuple[int, str], RequestOwner] = {}  # with unfinished requests
        self._max_debt = max_debt
        self._by_name = by_name
        self._last_started = RequestOwner()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return heapq.merge(*(owner.waiting for owner in self.owners.values()), key=_by_key)

    # ------------------------------------------------------------ owners

    def enter(self, client_index: int, name: str, weight: float) -> RequestOwner:
        """The owner of a new request, until `leave`. The last weight applies; 0: background."""
        identity = (0 if self._by_name else client_index, name)
        owner = self.owners.get(identity)
        if owner is None:
            owner = self.owners[identity] = RequestOwner(identity, self._last_started.served)
        owner.weight, owner.is_background = weight or BACKGROUND_WEIGHT, not weight
        owner.num_requests += 1
        return owner

    def leave(self, owner: RequestOwner) -> None:
        """One of the owner's requests has ended."""
        owner.num_requests -= 1
        if not owner.num_requests:
            del self.owners[owner.identity]

    def charge(self, request: Request, num_tokens: int) -> None:
        """These tokens of the request are computed. Those that a preemption makes the engine
        compute again are not charged.
        """
        num_new = request.num_computed_tokens - request.num_computed_before_preemption
        if num_new > 0:
            request.owner.served += min(num_tokens, num_new) / request.owner.weight

    def charge_time(self, request: Request, seconds: float) -> None:
        """The request's grammar has taken this much CPU time, which other rows waited for."""
        request.owner.served += seconds * TOKENS_PER_S / request.owner.weight

    # ------------------------------------------------------------ waiting requests

    def add(self, request: Request) -> None:
        owner = request.owner
        if not owner.waiting:
            waiting = [other.served for other in self.owners.values() if other.waiting]
            least = min(waiting, default=self._last_started.served)
            owner.served = min(max(owner.served, least), least + self._max_debt)
        insort(owner.waiting, request, key=_by_key)
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        """The request ends, or starts."""
        waiting = request.owner.waiting
        del waiting[bisect_left(waiting, request.key, key=_by_key)]
        self._num_waiting -= 1

    def start(self, request: Request) -> None:
        self.remove(request)
        self._last_started = request.owner

    def next(self, passed: dict[RequestOwner, int]) -> Request | None:
        """The request whose turn it is, leaving out the first `passed[owner]` of each owner.

        Among owners with equal service, that of the one with the fewest requests.
        """
        if len(self.owners) > 1 or passed:
            return self._next_of_all(passed)
        return next((owner.waiting[0] for owner in self.owners.values() if owner.waiting), None)

    def _next_of_all(self, passed: dict[RequestOwner, int]) -> Request | None:
        best: RequestOwner | None = None
        for owner in self.owners.values():
            if len(owner.waiting) > passed.get(owner, 0) and (
                best is None
                or (owner.served, owner.num_requests) < (best.served, best.num_requests)
            ):
                best = owner
        return None if best is None else best.waiting[passed.get(best, 0)]
