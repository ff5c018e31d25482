"""Blocks and states that several ranks keep outside their caches, each its own share of them.

Must not know: what a block holds, where a rank keeps it, what carries messages.

Each rank has a store of its own and decides alone what leaves it. This process has the book: which
names each rank has, as the ranks tell. A block or a state counts as kept while all ranks have it
whose layers have a part of it. The book may be late, since engines may share the files of ranks; so
what has been loaded is what all ranks say that they have loaded.

Each rank fetches its share of what other engines have by itself, beside steps. Once all have
ended, the book is brought up to date before it is read. A rank of another engine that asks for
blocks gets an answer beside steps, too: so a producer waits for its ranks at a request's end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, Protocol

from ...ipc.block_offload import Beginning, Transfers, name_in_group
from ...ipc.config import CacheConfig
from ...ipc.failures import unpack_exception
from ..offload.names import ALL, count_to_state, is_block
from .messages import Kept, MoveBlocks, OffloadOpened


class RankCalls(Protocol):
    """How ranks are asked to move blocks, in the order of these calls and of steps."""

    def ask(self, command: MoveBlocks) -> list[Kept]:
        """The answers of all ranks, once the steps that were begun have ended."""
        ...

    def submit(self, command: MoveBlocks, on_reply: Callable[[list[Kept]], None]) -> None:
        """Returns at once. on_reply gets the answers, before those of any later command are
        returned.
        """
        ...

    def fetch(self, beginning: Beginning) -> Future[None]:
        """Has each rank fetch its share (BlockOffload.fetch), beside moves and steps. The future is
        done once all ranks have ended; cancelling it ends them.
        """
        ...


class RanksOffload:
    """Implements BlockOffload (ipc/block_offload.py)."""

    def __init__(self, calls: RankCalls, opened: Sequence[OffloadOpened], config: CacheConfig):
        """opened: of each rank. Raises what a rank has raised."""
        for failure in (one.failure for one in opened):
            if failure is not None:
                raise unpack_exception(failure, RuntimeError)
        self._calls = calls
        self.num_stored = self.num_states_stored = 0
        self._sends, self._receives = config.sends_kv, config.receives_kv
        self._transfers = [Transfers() for _ in opened]
        self._has_fetched = False  # what the book does not have yet
        stores = [one for one in opened if one.block_bytes]
        self.num_blocks = min((one.num_blocks for one in stores), default=0)
        self.block_bytes = sum(one.block_bytes for one in stores)
        self.blocks_per_state = max(one.blocks_per_state for one in opened)
        self._pieces = [one.blocks_per_state for one in opened]  # of a state, on each rank
        self._num_corrupt = [0] * len(opened)
        self._books: list[set[bytes]] = [set() for _ in opened]  # names on each rank
        # of the ranks that have a part of each block
        self._block_books = [book for book, one in zip(self._books, opened) if one.has_blocks]
        self._kept: set[bytes] = set()  # names that all of these have
        self._tracks_changes = config.publishes_kv_events  # for take_changes
        self._changed: dict[bytes, None] = {}  # names of blocks, since take_changes
        self._reported: set[bytes] = set()
        self.note([one.kept for one in opened])

    @property
    def num_corrupt(self) -> int:
        """See BlockOffload: of all ranks."""
        return sum(self._num_corrupt)

    @property
    def transfers(self) -> Transfers:
        """See BlockOffload: of all ranks, as they were with the last step or move of blocks. A
        prompt of which several ranks did not get all counts once.
        """
        names = [field.name for field in fields(Transfers)]
        total = {name: sum(getattr(one, name) for one in self._transfers) for name in names}
        total["num_pulls_failed"] = max(one.num_pulls_failed for one in self._transfers)
        return Transfers(**total)

    def fetch(self, beginning: Beginning) -> Future[None] | None:
        """See BlockOffload."""
        if not self._receives or self._has_all(beginning):
            return None
        fetch = self._calls.fetch(beginning)
        fetch.add_done_callback(self._note_fetched)
        return fetch

    def _has_all(self, beginning: Beginning) -> bool:
        """Whether the ranks, or the cache, have all that there could be of a prompt."""
        digests, cached, kept = beginning.digests, beginning.cached, self.kept_blocks()

        def is_missing(group: int, index: int) -> bool:
            name = name_in_group(digests[index], group)
            return name not in cached and name not in kept

        most = len(digests)
        has_state = not self.blocks_per_state or beginning.num_to_state == most
        has_state = has_state or self.count_to_state(digests) == most
        return has_state and beginning.layout.longest_kept(most, is_missing) == most

    def _note_fetched(self, _: Future[None]) -> None:
        self._has_fetched = True

    def _catch_up(self) -> None:
        """Asks the ranks for what they have fetched."""
        if self._has_fetched:
            self._has_fetched = False
            self._ask("touch", [])

    # ------------------------------------------------------------ the book

    def note(self, replies: Sequence[Kept | None]) -> None:
        """What the ranks keep has changed; None: that of this rank has not."""
        changed: dict[bytes, None] = {}
        for rank, reply in enumerate(replies):
            if reply is not None:
                self._books[rank].difference_update(reply.removed)
                self._books[rank].update(reply.added)
                self._num_corrupt[rank] = reply.num_corrupt
                self._transfers[rank] = reply.transfers or self._transfers[rank]
                changed.update(dict.fromkeys((*reply.removed, *reply.added)))
        for name in changed:
            if self._block_books and all(name in book for book in self._block_books):
                self._kept.add(name)
            else:
                self._kept.discard(name)
        if self._tracks_changes:
            self._changed.update(dict.fromkeys(filter(is_block, changed)))

    def kept_blocks(self) -> Container[bytes]:
        """See BlockOffload."""
        self._catch_up()
        return self._kept if self._block_books else ALL

    def count_to_state(self, names: Sequence[bytes]) -> int:
        """See BlockOffload: the last state of which all ranks have all pieces."""
        self._catch_up()
        return self._count_to_state(names)

    def _count_to_state(self, names: Sequence[bytes]) -> int:
        count, before = len(names), -1
        while count != before:
            before = count
            for book, num_pieces in zip(self._books, self._pieces):
                if num_pieces:
                    count = count_to_state(book, names[:count], num_pieces)
        return count if self.blocks_per_state else 0

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """See BlockOffload."""
        kept, reported = self._kept, self._reported
        added = [name for name in self._changed if name in kept and name not in reported]
        removed = [name for name in self._changed if name not in kept and name in reported]
        self._changed.clear()
        reported.update(added)
        reported.difference_update(removed)
        return added, removed

    # ------------------------------------------------------------ what ranks move

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """See BlockOffload. A block counts as kept once all ranks have stored it."""
        if not self._block_books:
            return
        new = [name for _, name in blocks if name not in self._kept]

        def count(replies: list[Kept]) -> None:
            self.note(replies)
            self.num_stored += sum(name in self._kept for name in new)

        self._calls.submit(MoveBlocks("store", [list(blocks)]), count)

    def store_states(self, states: Sequence[tuple[int, bytes]]) -> None:
        """See BlockOffload and store."""
        new = [name for _, name in states if not self._count_to_state([name])]

        def count(replies: list[Kept]) -> None:
            self.note(replies)
            self.num_states_stored += sum(self._count_to_state([name]) for name in new)

        self._calls.submit(MoveBlocks("store_states", [list(states)]), count)

    def load(self, blocks: Sequence[tuple[int, bytes]]) -> bool:
        """See BlockOffload."""
        return not self._block_books or self._ask("load", list(blocks))

    def touch(self, names: Sequence[bytes]) -> None:
        """See BlockOffload. In a producer these are the blocks of a request that has ended: others
        may ask for them as soon as they hear of it, so they are stored by then.
        """
        if self._sends:
            self._ask("touch", list(names))
        else:
            self._calls.submit(MoveBlocks("touch", [list(names)]), self.note)

    def load_state(self, place: int, name: bytes) -> bool:
        """See BlockOffload."""
        return self._ask("load_state", place, name)

    def remove(self, names: Sequence[bytes]) -> None:
        """See BlockOffload."""
        self._ask("remove", list(names))

    def clear(self) -> None:
        """See BlockOffload."""
        self._ask("clear")

    def _ask(self, method: str, *args: Any) -> bool:
        """Whether all ranks have done it."""
        replies = self._calls.ask(MoveBlocks(method, list(args)))
        self.note(replies)
        return all(reply.is_loaded for reply in replies)
