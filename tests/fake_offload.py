"""A fake place for evicted blocks and states: it keeps the digests of a fake executor's cache, and
loses some if it is told to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future

from quire.ipc.block_offload import Beginning, Transfers


class FakeOffload:
    """Implements BlockOffload. A state takes the room of two blocks. `loss`: the part of loads that
    find a block or a state damaged.
    """

    block_bytes, blocks_per_state = 2**20, 2

    def __init__(
        self,
        num_blocks: int,
        cache: Callable[[], list[list[int | None]]],
        states: Callable[[], list[int]] = list,
        wait: Callable[[], None] = lambda: None,
    ):
        """wait: until the steps that were begun have run."""
        self.num_blocks, self.num_corrupt = num_blocks, 0
        self.num_stored = self.num_states_stored = 0
        self.transfers = Transfers()
        self.loss, self.rng = 0.0, random.Random(0)
        self.kept: dict[bytes, list[int | None]] = {}  # the first leaves first
        self.kept_states: dict[bytes, int] = {}  # also
        self._cache, self._states, self._wait = cache, states, wait
        self._reported: set[bytes] = set()

    def fetch(self, beginning: Beginning) -> Future[None] | None:
        return None

    def kept_blocks(self) -> Container[bytes]:
        return self.kept

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        self._wait()
        cache = self._cache()
        for block, name in blocks:
            assert len(name) == 32 and None not in cache[block]
            content = self.kept.pop(name, None)
            self.num_stored += content is None
            assert content in (None, cache[block]), "two contents with one name"
            self.kept[name] = list(cache[block])
        self._make_room()

    def _make_room(self) -> None:
        while len(self.kept) + self.blocks_per_state * len(self.kept_states) > self.num_blocks:
            kept = self.rng.choice([one for one in (self.kept, self.kept_states) if one])
            del kept[next(iter(kept))]

    def load(self, blocks: Sequence[tuple[int, bytes]]) -> bool:
        self._wait()
        cache = self._cache()
        for block, name in blocks:
            if self.rng.random() < self.loss:
                self.kept.pop(name, None)
                self.num_corrupt += 1
            if name not in self.kept:
                return False
            cache[block] = list(self.kept[name])
        return True

    def count_to_state(self, names: Sequence[bytes]) -> int:
        found = self.kept_states
        return next((i for i in range(len(names), 0, -1) if names[i - 1] in found), 0)

    def store_states(self, states: Sequence[tuple[int, bytes]]) -> None:
        self._wait()
        places = self._states()
        for place, name in states:
            content = self.kept_states.pop(name, None)
            self.num_states_stored += content is None
            assert content in (None, places[place]), "two states with one name"
            self.kept_states[name] = places[place]
        self._make_room()

    def load_state(self, place: int, name: bytes) -> bool:
        self._wait()
        if self.rng.random() < self.loss:
            self.kept_states.pop(name, None)
            self.num_corrupt += 1
        if name not in self.kept_states:
            return False
        self._states()[place] = self.kept_states[name]
        return True

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        before, self._reported = self._reported, set(self.kept)
        return list(self._reported - before), list(before - self._reported)

    def touch(self, names: Sequence[bytes]) -> None:
        for name in names:
            if name in self.kept:
                self.kept[name] = self.kept.pop(name)

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.kept.pop(name, None)
            self.kept_states.pop(name, None)

    def clear(self) -> None:
        self.kept.clear()
        self.kept_states.clear()
