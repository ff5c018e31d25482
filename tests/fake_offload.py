"""A fake place for evicted blocks and states: it keeps the digests of a fake executor's cache, and
loses some if it is told to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


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
    ):
        self.num_blocks, self.num_corrupt = num_blocks, 0
        self.loss, self.rng = 0.0, random.Random(0)
        self.kept: dict[bytes, list[int | None]] = {}  # the first leaves first
        self.kept_states: dict[bytes, int] = {}  # also
        self._cache, self._states = cache, states
        self._reported: set[bytes] = set()

    def count_present(self, names: Sequence[bytes]) -> int:
        return next((i for i, name in enumerate(names) if name not in self.kept), len(names))

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        cache, num_new = self._cache(), 0
        for block, name in blocks:
            assert len(name) == 32 and None not in cache[block]
            content = self.kept.pop(name, None)
            num_new += content is None
            assert content in (None, cache[block]), "two contents with one name"
            self.kept[name] = list(cache[block])
        self._make_room()
        return num_new

    def _make_room(self) -> None:
        while len(self.kept) + self.blocks_per_state * len(self.kept_states) > self.num_blocks:
            kept = self.rng.choice([one for one in (self.kept, self.kept_states) if one])
            del kept[next(iter(kept))]

    def load(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        cache = self._cache()
        for count, (block, name) in enumerate(blocks):
            if self.rng.random() < self.loss:
                self.kept.pop(name, None)
                self.num_corrupt += 1
            if name not in self.kept:
                return count
            cache[block] = list(self.kept[name])
        return len(blocks)

    def count_to_state(self, names: Sequence[bytes]) -> int:
        found = self.kept_states
        return next((i for i in range(len(names), 0, -1) if names[i - 1] in found), 0)

    def store_states(self, states: Sequence[tuple[int, bytes]]) -> int:
        places, num_new = self._states(), 0
        for place, name in states:
            content = self.kept_states.pop(name, None)
            num_new += content is None
            assert content in (None, places[place]), "two states with one name"
            self.kept_states[name] = places[place]
        self._make_room()
        return num_new

    def load_state(self, place: int, name: bytes) -> bool:
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

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.kept.pop(name, None)
            self.kept_states.pop(name, None)

    def clear(self) -> None:
        self.kept.clear()
        self.kept_states.clear()
