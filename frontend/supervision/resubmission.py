"""Resubmission decides in which order the requests of a dead engine are submitted to the next one,
and which request is the cause if that one dies too.

Must not know: how an engine is started or called, why it died.

The request that ends engines is not known at first. After a death, requests are submitted one at a
time, each when the one before has a new token, those first that had none. After SIGKILL, which
often comes from outside, they are submitted together, which is faster. If the engine dies again,
only requests that were in flight at both deaths, and made no progress in between, are suspects. One
that had no token since is tried alone; several with a few tokens are divided into halves. A suspect
that was alone in the engine when it died is the cause. The only suspect beside other requests is
tried alone first, because it may only be the one that was submitted last.

Requests with a grammar come last: an engine may check it first, in a process that it starts, and
other requests do not wait for this. While its grammar is checked a request is no suspect; the
engine's first row for it, which may hold no token, tells the end of the check.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass

from ...ipc.messages import EngineCoreOutputs, EngineCoreRequest
from ..clients.journal import Entry

# A request that has received so many tokens since a death did not cause it, because a step in one
# call, and the rows that were on their way, hold fewer.
PROBATION_TOKENS = 32

# A request must have seen so many deaths in a row to be the cause. It must have been alone in the
# engine so often if SIGKILL ended it.
NUM_DEATHS, NUM_ALONE_IF_KILLED = 2, 3

MAX_NEW_FIRST = 8  # requests without a token that are submitted before those with tokens


@dataclass
class Suspect:
    """A request that was in flight when an engine died."""

    num_deaths: int  # in a row, without progress in between
    num_alone: int  # of these, those at which no other request was in the engine
    num_tokens: int  # when it was last submitted


@dataclass
class Group:
    """Requests that are submitted together. The next group waits until each has `num_new` tokens or
    has ended.
    """

    entries: list[Entry]
    num_new: int = 1


class Resubmission:
    def __init__(self) -> None:
        self._suspects: dict[str, Suspect] = {}  # by engine id
        self._groups: deque[Group] = deque()
        # The next group waits until each request of the last one has this number of output tokens.
        self._awaited: dict[str, int] = {}
        # These are no suspects: submitted requests whose grammar the engine may still check, and
        # requests that no engine has received.
        self._not_computed: set[str] = set()
        # It says whether the last death left fewer suspects to try, and none that is clearly the
        # cause.
        self.narrows = False

    @property
    def is_active(self) -> bool:
        """Returns whether a request waits here."""
        return bool(self._groups)

    def on_restart(self, entries: list[Entry]) -> None:
        """Notes that the engine with these requests was ended on purpose, so none of them is
        suspected.
        """
        self._suspects, self.narrows = {}, False
        self._not_computed.clear()
        self._plan([], [], entries, is_together=True)

    def on_death(self, entries: list[Entry], *, is_killed: bool = False) -> Entry | None:
        """Plans the resubmission of these requests, which were unfinished when the engine died.
        Returns the request that is the cause, if that is clear, and leaves it out.

        is_killed: SIGKILL ended the engine, perhaps from outside.
        """
        waiting = {request.request_id for group in self._groups for request, _ in group.entries}
        before, self._suspects = self._suspects, {}
        idle: list[Entry] = []  # suspects that have no token since they were submitted
        active: list[Entry] = []  # other suspects
        rest: list[Entry] = []
        num_present = 0  # requests that the engine may have computed
        for entry in entries:
            request_id, num_tokens = entry[0].request_id, len(entry[1])
            suspect = before.get(request_id)
            num_deaths, num_alone = 1, int(len(entries) == 1)
            is_new = is_of(request_id, self._not_computed)
            if is_of(request_id, waiting) or is_new:  # this death had another cause
                rest.append(entry)
                if suspect is None:
                    continue
            else:
                num_present += 1
                if suspect is None or num_tokens >= suspect.num_tokens + PROBATION_TOKENS:
                    rest.append(entry)
                else:
                    (idle if num_tokens == suspect.num_tokens else active).append(entry)
                    num_deaths, num_alone = suspect.num_deaths + 1, suspect.num_alone
            self._suspects[request_id] = Suspect(num_deaths, num_alone, num_tokens)
        self._not_computed.clear()
        culprit = None
        if num_present == len(idle) + len(active) == 1:
            (alone,) = idle + active
            suspect = self._suspects[alone[0].request_id]
            suspect.num_alone += 1
            num_alone_needed = NUM_ALONE_IF_KILLED if is_killed else 1
            if suspect.num_deaths >= NUM_DEATHS and suspect.num_alone >= num_alone_needed:
                culprit, idle, active = alone, [], []
                del self._suspects[alone[0].request_id]
        self._plan(idle, active, rest, is_killed)
        self.narrows = bool(idle or active)
        return culprit

    def _plan(
        self, idle: list[Entry], active: list[Entry], rest: list[Entry], is_together: bool
    ) -> None:
        half = (len(active) + 1) // 2
        halves = [Group(part, PROBATION_TOKENS) for part in (active[:half], active[half:]) if part]
        # A request that ends the engine with its prompt is among the first without a token. Many
        # more of these may have waited for their turn; they do not delay those that were running.
        plain = [entry for entry in rest if not _has_grammar(entry)]
        new = [entry for entry in plain if not entry[1]]
        running = [entry for entry in plain if entry[1]]
        singles = new[:MAX_NEW_FIRST] + running + new[MAX_NEW_FIRST:]
        grammars = [entry for entry in rest if _has_grammar(entry)]
        singles += [entry for entry in grammars if entry[1]]
        others = [Group(singles)] if is_together else [Group([entry]) for entry in singles]
        self._awaited = {}
        self._groups = deque([*(Group([entry]) for entry in idle), *halves, *others])
        if unknown := [entry for entry in grammars if not entry[1]]:
            self._groups.append(Group(unknown, 0))

    def add(self, request: EngineCoreRequest) -> None:
        """Adds a new request, which waits until the others have been submitted."""
        self._groups.append(Group([(request, request.resume_tokens)], 0))

    def note_unsent(self, request_id: str) -> None:
        """Notes that a new request came after the engine's death."""
        self._not_computed.add(request_id)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drops requests that have been aborted, or all completions of these."""
        dropped = set(request_ids)
        for group in self._groups:
            group.entries = [e for e in group.entries if not is_of(e[0].request_id, dropped)]
        self._not_computed -= dropped
        self._awaited = {
            one: target for one, target in self._awaited.items() if not is_of(one, dropped)
        }

    def take(self, outputs: EngineCoreOutputs) -> None:
        """Notes the progress in the engine's outputs."""
        awaited = self._awaited
        if self._not_computed:
            self._not_computed.difference_update(outputs.request_ids)
        ended = {finished.row for finished in outputs.finished}
        for row, request_id in enumerate(outputs.request_ids):
            target = awaited.get(request_id)
            if target is not None:
                num_tokens = outputs.first_indices[row] + outputs.num_tokens[row]
                if num_tokens >= target or row in ended:
                    del awaited[request_id]

    def due(self) -> list[Entry]:
        """Returns the requests to submit now."""
        due: list[Entry] = []
        while self._groups and not self._awaited:
            group = self._groups.popleft()
            due += group.entries
            self._not_computed.update(e[0].request_id for e in group.entries if _has_grammar(e))
            if group.num_new:
                self._awaited = {
                    request.request_id: len(tokens) + group.num_new
                    for request, tokens in group.entries
                }
        return due


def is_of(request_id: str, ids: Container[str]) -> bool:
    """Returns whether it is one of these, or a completion of one of these (see
    child_request_id).
    """
    return request_id in ids or request_id.partition("_")[2] in ids


def _has_grammar(entry: Entry) -> bool:
    return entry[0].structured_outputs is not None
