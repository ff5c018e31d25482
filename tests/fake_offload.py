"""A fake place for evicted blocks: it keeps the digests of a fake executor's cache, and loses some
if it is told to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence


class FakeOffload:
    """Implements BlockOffload. `loss`: the part of loads that find a block damaged."""

    def __init__(self, num_blocks: int, cache: Callable[[], list[list[int | None]]]):
        self.num_blocks, self.num_corrupt = num_blocks, 0
        self.loss, self.rng = 0.0, random.Random(0)
        self.kept: dict[bytes, list[int | None]] = {}  # the first leaves first
        self._cache = cache
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
        while len(self.kept) > self.num_blocks:
            del self.kept[next(iter(self.kept))]
        return num_new

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

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        before, self._reported = self._reported, set(self.kept)
        return list(self._reported - before), list(before - self._reported)

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.kept.pop(name, None)

    def clear(self) -> None:
        self.kept.clear()
