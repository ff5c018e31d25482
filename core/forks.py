"""The requests of one message with n > 1, and the source of their shared prompt.

Must not know: queues, slots, when a step runs.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

from .request import Request, RequestStatus

if TYPE_CHECKING:
    from .kv_cache.block_pool import ParkedBlocks


@dataclass(slots=True, eq=False)
class Family:
    """The unfinished requests of one message, in order of arrival.

    The prompt is computed once. The others take it from a running member that has computed it
    (`find_source`), or, if that member has ended, from the blocks that it left (`parked`).
    """

    request_id: str  # the message's
    first_members: InitVar[list[Request]]  # with consecutive keys
    members: dict[str, Request] = field(init=False)
    last_key: tuple[int, int] = field(init=False)
    parked: ParkedBlocks | None = None
    _source: Request | None = None
    _started: list[Request] = field(default_factory=list)  # admitted members; some may have ended
    _unstarted: set[str] = field(init=False)  # never admitted

    def __post_init__(self, first_members: list[Request]) -> None:
        self.members = {member.request_id: member for member in first_members}
        self.last_key = first_members[-1].key
        self._unstarted = set(self.members)

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

    def waits_for_prompt(self, request: Request) -> bool:
        """Whether another member is to compute the prompt for this one."""
        return self.first is not request and self.find_source() is None

    def leave(self, request: Request) -> None:
        """The member ends. Its status may still be RUNNING."""
        del self.members[request.request_id]
        self._unstarted.discard(request.request_id)
