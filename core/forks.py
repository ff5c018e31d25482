"""The requests of one message with n > 1, and the source of their shared prompt.

Must not know: queues, slots, when a step runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .request import Request, RequestStatus

if TYPE_CHECKING:
    from .kv_cache.kv_cache_manager import ParkedBlocks


class Family:
    """The unfinished requests of one message, in order of arrival.

    The prompt is computed once. The others take it from a running member that has computed it
    (`find_source`), or, if that member has ended, from the blocks that it left (`parked`).
    """

    __slots__ = (
        "_source",
        "_started",
        "_unstarted",
        "last_key",
        "members",
        "parked",
        "request_id",
    )

    def __init__(self, request_id: str, members: list[Request]):
        """`request_id` is the message's; `members` have consecutive keys."""
        self.request_id = request_id
        self.members = {member.request_id: member for member in members}
        self.last_key = members[-1].key
        self.parked: ParkedBlocks | None = None
        self._source: Request | None = None
        self._started: list[Request] = []  # admitted members; some may have ended
        self._unstarted = set(self.members)  # never admitted

    @property
    def first(self) -> Request:
        """The member that computes the prompt if none has."""
        return next(iter(self.members.values()))

    def note_start(self, request: Request) -> None:
        """A member was admitted."""
        self._started.append(request)
        self._unstarted.discard(request.request_id)

    @property
    def has_unstarted(self) -> bool:
        return bool(self._unstarted)

    def find_source(self) -> Request | None:
        """A running member whose prompt is computed. Searches admitted members only."""
        if self._source is None or not self.has_prompt(self._source):
            self._started = [r for r in self._started if r.status is RequestStatus.RUNNING]
            self._source = next((r for r in self._started if self.has_prompt(r)), None)
        return self._source

    def has_prompt(self, request: Request) -> bool:
        """Whether the blocks of this member hold the whole prompt."""
        return (
            request.status is RequestStatus.RUNNING
            and request.num_executed_tokens >= request.num_prompt_tokens
            and request.request_id in self.members
        )

    def leave(self, request: Request) -> None:
        """The member ends. Its status may still be RUNNING."""
        del self.members[request.request_id]
        self._unstarted.discard(request.request_id)
