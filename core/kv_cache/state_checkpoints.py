"""Checkpoints of the states of recurrent layers: where they are kept, and after which tokens one is
taken.

Must not know: which request runs when, slots, the memory behind a place, torch.

A state cannot be cut: what a layer keeps after 1000 tokens says nothing about the first 500. So a
state is copied at the end of a block, under the block's hash, and a prompt that begins alike starts
from the copy. A place holds one copy, and is one of four things:

    free ──▶ pending (a step writes it) ──▶ named (can be found) ──▶ free, or used for another
      └────▶ parked (the state of a request that was swapped out) ──▶ free

Steps run in the order in which they are scheduled, and a step makes its copies before its rows
write. So a place may be given away in the very step that copies from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ...ipc.counters import EngineCounters
from ..forks import Family
from ..request import Request
from .offload import OffloadedBlocks

# A checkpoint is not taken where it would save fewer tokens than this, compared with the one before
# it. It has the size of the keys and values of hundreds of tokens and takes the place of another
# one; to write it and to copy it back takes as long as a few tokens of a prompt.
LEAST_TOKENS = 64
# Of those that are taken for the interval alone, and from which no request has started, one of so
# many is kept elsewhere when it makes room: they have several times the size of the keys and values
# between them, and are seldom asked for once there are later ones.
INTERVALS_ELSEWHERE = 8


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state after the first `num_tokens` tokens of all sequences that have the block `name`."""

    place: int
    name: bytes
    num_tokens: int
    is_used: bool = False  # a request has started from it
    num_pins: int = 0
    is_of_adapter: bool = False  # LoRA: the name means something in this engine alone
    is_between: bool = False  # taken for the interval alone


@dataclass(slots=True, eq=False)
class Progress:
    """Of a running request: the checkpoints that it has taken and that steps in flight take."""

    kept: int  # tokens before the last checkpoint that stays, or with which it has started
    num_shared: int  # tokens whose blocks others had computed when it started
    tail: Checkpoint | None = None  # the last one of its output, replaced by the next
    # (tokens before it, place, whether it is a tail), written by steps that have not ended
    pending: list[tuple[int, int, bool]] = field(default_factory=list)


class StateCheckpoints:
    """Owns the places of checkpoints. A checkpoint without its blocks is of no use; blocks may
    outlive theirs.

    A request takes them, as far as there are places,

    - after every `interval` tokens;
    - after the last full block of its prompt, from which the same prompt and, where an answer's
      reasoning is left out later, the next turn of a conversation start;
    - where its prompt leaves blocks that others have computed, since others may do so again;
    - after the last full block of its output, for the next turn. Where the output ends is not known
      in advance. So one is taken after each block, and replaces the one before unless a request has
      started from that. Every token of the output reads and writes the state anyway, so this adds a
      thirty-second part (with blocks of 16 tokens), and a request has one such place.
    """

    def __init__(
        self,
        places: range,
        block_size: int,
        interval: int,
        counters: EngineCounters,
        *,
        is_cache: bool = True,
        offload: OffloadedBlocks | None = None,
    ):
        """interval: in tokens, a multiple of block_size. is_cache: whether requests may start from
        checkpoints of others; if not, only the completions of one prompt share one. offload: takes
        those that make room, and brings them back.
        """
        self.places = places
        self._block_size, self._interval, self._counters = block_size, interval, counters
        self._least_tokens = min(LEAST_TOKENS, interval)
        self._is_cache, self._offload = is_cache, offload
        self._free = list(reversed(places))
        self._named: dict[bytes, Checkpoint] = {}  # the least recently used first
        self._parked: dict[str, int] = {}  # place by id of a swapped request
        self._progress: dict[str, Progress] = {}  # by id of a running request
        self._shared: dict[str, Checkpoint] = {}  # by id of a family; pinned

    @property
    def num_named(self) -> int:
        return len(self._named)

    # ------------------------------------------------------------ finding them

    def find(self, names: Sequence[bytes]) -> Checkpoint | None:
        """The deepest checkpoint at the end of one of these blocks, which begin a sequence."""
        found = self._named
        return next((found[name] for name in reversed(names) if name in found), None)

    def load(self, name: bytes, num_tokens: int, busy: Collection[int]) -> Checkpoint | None:
        """Brings a checkpoint back that is kept elsewhere, and returns it. busy: places from which
        the step being made copies, which are not written before it runs. None: there is no room, or
        it could not be loaded.
        """
        assert self._offload is not None
        place = self._take_place(busy)
        if place is None:
            return None
        if not self._offload.load_state(place, name):
            self._free.append(place)
            return None
        checkpoint = self._named[name] = Checkpoint(place, name, num_tokens)
        return checkpoint

    def kept(self) -> list[tuple[int, bytes]]:
        """(place, name) of each checkpoint that is worth keeping elsewhere, the last used one
        last.
        """
        found = self._named.values()
        return [(one.place, one.name) for one in found if self._is_worth_keeping(one)]

    def _is_worth_keeping(self, checkpoint: Checkpoint) -> bool:
        """Whether it is kept elsewhere when it makes room."""
        if checkpoint.is_of_adapter or checkpoint.is_used or not checkpoint.is_between:
            return not checkpoint.is_of_adapter
        return checkpoint.num_tokens % (INTERVALS_ELSEWHERE * self._interval) == 0

    def use(self, checkpoint: Checkpoint) -> None:
        """A request starts from it: the step being made copies it."""
        checkpoint.is_used = True
        self._touch(checkpoint)
        self._counters.num_states_restored += 1

    def _touch(self, checkpoint: Checkpoint) -> None:
        self._named[checkpoint.name] = self._named.pop(checkpoint.name)

    # ------------------------------------------------------------ the completions of one prompt

    def is_shareable(self, request: Request) -> bool:
        """Whether a prompt is long enough for a checkpoint that its completions share."""
        return self._last_of_prompt(request) >= self._least_tokens

    def shared_by(self, family: Family) -> Checkpoint | None:
        """The checkpoint from which members start that were not admitted yet."""
        return self._shared.get(family.request_id)

    def share(self, request: Request, checkpoint: Checkpoint) -> None:
        """Keeps a checkpoint that the request has taken or begins with for completions of its
        prompt that were not admitted yet, if it is the deepest so far and not one of its output.
        Completions that have ended may have left blocks for the one before.
        """
        family = request.family
        if family is None or not family.has_unstarted:
            return
        if checkpoint.num_tokens >= request.num_prompt_tokens:
            return
        before = self._shared.get(family.request_id)
        if before is not None and before.num_tokens >= checkpoint.num_tokens:
            return
        if family.parked is None:
            self.unshare(family)
            checkpoint.num_pins += 1
            self._shared[family.request_id] = checkpoint

    def unshare(self, family: Family) -> None:
        """No member needs it any more."""
        checkpoint = self._shared.pop(family.request_id, None)
        if checkpoint is not None:
            checkpoint.num_pins -= 1
            if not self._is_cache and not checkpoint.num_pins:
                self._forget(checkpoint)

    # ------------------------------------------------------------ taking them

    def begin(self, request: Request, kept: int, num_shared: int) -> None:
        """The request runs from now on. kept and num_shared: see Progress."""
        self._progress[request.request_id] = Progress(kept, num_shared)

    def fit(self, request: Request, first: int, num_tokens: int, num_shared: int = 0) -> int:
        """How many of `num_tokens` tokens after the first `first` a row may have, so that it takes
        one checkpoint of those that stay. num_shared: of a request that has not begun.
        """
        progress = self._progress.get(request.request_id) or Progress(first, num_shared)
        stops = self._stops(request, progress, first, first + num_tokens)
        stop = next(stops, None)
        if stop is None or next(stops, None) is None:
            return num_tokens
        return stop - first

    def take(self, request: Request, first: int, end: int) -> tuple[int, int] | None:
        """The checkpoint to be taken by a row that computes the tokens [first, end): (the tokens
        before it, its place), or None.
        """
        block_size = self._block_size
        last = end // block_size * block_size
        if last <= first:
            return None
        progress = self._progress[request.request_id]
        stop, is_tail = max(self._stops(request, progress, first, end), default=0), False
        if not stop:
            is_tail = self._is_cache and last > request.num_prompt_tokens
            is_tail = is_tail and last - progress.kept >= self._least_tokens
            if not is_tail:
                return None
            stop = last
        place = self._take_place()
        if place is None:
            return None
        if not is_tail:
            progress.kept = stop
        progress.pending.append((stop, place, is_tail))
        return stop, place

    def take_back(self, request: Request, num_tokens: int) -> None:
        """The row in flight computes the first `num_tokens` tokens of the request and no more: the
        checkpoint that it was to take after them is not written, and a later row takes it.
        """
        progress = self._progress[request.request_id]
        if progress.pending and progress.pending[-1][0] > num_tokens:
            stop, place, is_tail = progress.pending.pop()
            self._free.append(place)
            if not is_tail:
                progress.kept = stop - self._least_tokens

    def _stops(self, request: Request, progress: Progress, first: int, end: int) -> Iterator[int]:
        """After how many tokens, above `first` and at most `end`, the request is to take
        checkpoints that stay and that are not there yet; ascending.
        """
        last, kept = self._last_of_prompt(request), progress.kept
        if self._is_cache:
            interval = self._interval
            every = range((first // interval + 1) * interval, end + 1, interval)
            stops = sorted({*every, progress.num_shared, last})
        else:
            stops = [last] if request.family is not None and request.family.has_unstarted else []
        hashes = request.extend_block_hashes(self._block_size) if stops else []
        for stop in stops:
            if not first < stop <= end or stop - kept < self._least_tokens:
                continue
            kept, index = stop, stop // self._block_size - 1
            if index >= len(hashes) or hashes[index] not in self._named:
                yield stop

    def _last_of_prompt(self, request: Request) -> int:
        """The tokens before the end of the last block that another request with the same prompt can
        find: one token of it is left to compute.
        """
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    def _take_place(self, busy: Collection[int] = ()) -> int | None:
        """A free place, or that of the least recently used checkpoint, but none of `busy`."""
        for index in reversed(range(len(self._free))):
            if self._free[index] not in busy:
                return self._free.pop(index)
        for checkpoint in self._named.values():
            if not checkpoint.num_pins and checkpoint.place not in busy:
                if self._offload is not None and self._is_worth_keeping(checkpoint):
                    self._offload.evict_state(checkpoint.place, checkpoint.name)
                self._forget(checkpoint)
                self._counters.num_states_evicted += 1
                return self._free.pop()
        return None

    def _forget(self, checkpoint: Checkpoint) -> None:
        """Its place is free."""
        del self._named[checkpoint.name]
        self._free.append(checkpoint.place)

    def note_executed(self, request: Request, num_tokens: int) -> None:
        """The step has run that computes the first `num_tokens` tokens of the request: what it has
        written can be found.
        """
        progress = self._progress[request.request_id]
        if not progress.pending or progress.pending[0][0] > num_tokens:
            return
        hashes = request.extend_block_hashes(self._block_size)
        while progress.pending and progress.pending[0][0] <= num_tokens:
            stop, place, is_tail = progress.pending.pop(0)
            self._counters.num_states_saved += 1
            checkpoint = Checkpoint(place, hashes[stop // self._block_size - 1], stop)
            checkpoint.is_of_adapter = request.adapter is not None
            others = progress.num_shared, self._last_of_prompt(request)
            checkpoint.is_between = not is_tail and stop not in others
            checkpoint = self._name(checkpoint)
            if self._offload is not None and not (is_tail or checkpoint.is_of_adapter):
                self._offload.note_state(checkpoint.place, checkpoint.name)
            is_own_tail = is_tail and checkpoint.place == place
            if progress.tail is not None or is_own_tail:
                self._replace_tail(progress, checkpoint if is_own_tail else None)
            self.share(request, checkpoint)
            if not (self._is_cache or checkpoint.num_pins):
                self._forget(checkpoint)

    def _name(self, taken: Checkpoint) -> Checkpoint:
        """Makes a checkpoint findable, or returns the one that has the same state."""
        checkpoint = self._named.setdefault(taken.name, taken)
        if checkpoint is not taken:
            checkpoint.is_between &= taken.is_between
            self._free.append(taken.place)
            self._touch(checkpoint)
        return checkpoint

    def _replace_tail(self, progress: Progress, tail: Checkpoint | None) -> None:
        before, progress.tail = progress.tail, tail
        if before is None or before is tail or before.is_used or before.num_pins:
            return
        if self._named.get(before.name) is before:  # else it was evicted
            self._forget(before)

    # ------------------------------------------------------------ requests lose their place

    def end(self, request: Request) -> None:
        """The request does not run any more. What steps in flight write for it is not used."""
        progress = self._progress.pop(request.request_id, None)
        if progress is not None:
            self._free.extend(place for _, place, _ in progress.pending)

    def discard(self, request: Request) -> None:
        """The request has failed: no state is trusted that it may have begun with or left."""
        for name in request.block_hashes:
            if (checkpoint := self._named.get(name)) is not None:
                self._forget(checkpoint)
        self._drop_lost_shares()

    def park(self, request: Request) -> int | None:
        """The place for the state of a request that is swapped out. None: there is none."""
        place = self._take_place()
        if place is not None:
            self._parked[request.request_id] = place
        return place

    def unpark(self, request: Request) -> int | None:
        """The place of a request that was swapped out, which is free from now on; None if it was
        not.
        """
        place = self._parked.pop(request.request_id, None)
        if place is not None:
            self._free.append(place)
        return place

    def clear(self) -> None:
        """Forgets all checkpoints; parked states stay."""
        for checkpoint in [*self._named.values()]:
            self._forget(checkpoint)
        self._drop_lost_shares()

    def _drop_lost_shares(self) -> None:
        self._shared = {
            family: checkpoint
            for family, checkpoint in self._shared.items()
            if self._named.get(checkpoint.name) is checkpoint
        }

    # ------------------------------------------------------------ the check

    def check_integrity(self, running: Sequence[Request], swapped: Sequence[Request]) -> None:
        """Raises AssertionError unless each place is one thing, running requests take checkpoints,
        and swapped ones are parked.
        """
        places = [
            *self._free,
            *(checkpoint.place for checkpoint in self._named.values()),
            *self._parked.values(),
            *(place for one in self._progress.values() for _, place, _ in one.pending),
        ]
        if sorted(places) != list(self.places):
            raise AssertionError(f"places of states are lost, or held twice: {sorted(places)}")
        for name, have, want in (
            ("running", self._progress, running),
            ("swapped", self._parked, swapped),
        ):
            if sorted(have) != sorted(request.request_id for request in want):
                raise AssertionError(f"states of {list(have)}, {name}: {want}")
        pinned = [checkpoint for checkpoint in self._named.values() if checkpoint.num_pins]
        if sum(one.num_pins for one in pinned) != len(self._shared) or any(
            self._named.get(one.name) is not one for one in self._shared.values()
        ):
            raise AssertionError(f"pinned: {pinned}, shared: {self._shared}")
        misnamed = [name for name, one in self._named.items() if name != one.name]
        if misnamed:
            raise AssertionError(f"checkpoints under names of others: {misnamed}")

    def shared_families(self) -> set[str]:
        """The ids of messages for which a checkpoint is kept."""
        return set(self._shared)
