"""Blocks and states that the cache evicts go to a place outside it, and come back for a prompt
that needs them.

Must not know: where that place is, files, torch, which request runs when.

Blocks move between two steps, so that what has come back is known before a step is made of it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Sequence
from concurrent.futures import Future

from ...ipc.block_offload import Beginning, BlockOffload, name_in_group
from ...ipc.counters import EngineCounters
from ..request import Request
from .block_pool import KVCacheBlock
from .events import HASH_BYTES, KEY_BYTES


def name_of(key: bytes) -> bytes:
    """The name outside the cache of the block that the pool finds by `key` (key_of)."""
    return name_in_group(key[:HASH_BYTES], int.from_bytes(key[HASH_BYTES:]))


class OffloadedBlocks:
    """Which blocks and states go and come. Those of LoRA adapters stay: their hashes mean something
    in this engine alone.
    """

    def __init__(self, place: BlockOffload, counters: EngineCounters, *, is_shared: bool = False):
        """is_shared: whether other engines ask for blocks and states: they are stored as soon as
        they are computed, and not when they are evicted.
        """
        self._place, self._counters, self._is_shared = place, counters, is_shared
        # these are not stored yet; their content is still there
        self._evicted: list[tuple[int, bytes]] = []
        self._evicted_states: list[tuple[int, bytes]] = []
        self._released: list[bytes] = []  # names of blocks that requests do not hold any more
        self._of_adapters: set[bytes] = set()
        self._is_suspended = False

    def note_cached(self, request: Request, key: bytes, block: KVCacheBlock) -> None:
        """The cache has a new block, computed by this request."""
        if request.adapter is not None:
            self._of_adapters.add(key)
        elif self._is_shared:
            self.evict(block)

    def note_state(self, place: int, name: bytes) -> None:
        """There is a new state that requests without adapters can start from."""
        if self._is_shared:
            self.evict_state(place, name)

    def end_step(self) -> None:
        """What a step has computed is known. Call it before others learn that it has run."""
        if self._is_shared:
            self.flush()

    def note_forgotten(self, key: bytes) -> None:
        """The cache does not have a block any more."""
        self._of_adapters.discard(key)

    def note_released(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A request holds these blocks no more; its tail first, which is to leave first. Where
        blocks are stored when they are computed, they are stored from the head.
        """
        if self._is_shared:
            self._released += filter(None, map(self._name_outside, blocks))

    def evict(self, block: KVCacheBlock) -> None:
        """The cache is about to use the block for something else."""
        if (name := self._name_outside(block)) is not None:
            self._evicted.append((block.block_id, name))

    def _name_outside(self, block: KVCacheBlock) -> bytes | None:
        """The name under which the block may be kept outside the cache."""
        key = block.block_hash
        is_parked = key is not None and len(key) > KEY_BYTES
        return None if key is None or is_parked or key in self._of_adapters else name_of(key)

    def evict_state(self, place: int, name: bytes) -> None:
        """The place of a state that requests without adapters can start from is about to be used
        for something else.
        """
        self._evicted_states.append((place, name))

    def flush(self) -> None:
        """Stores what was evicted. Call it before anything is written to the cache."""
        self._is_suspended = False
        if self._evicted:
            self._place.store(self._evicted)
            self._evicted = []
        if self._evicted_states:
            self._place.store_states(self._evicted_states)
            self._evicted_states = []
        if self._released:
            self._place.touch(self._released)
            self._released = []
        self._count()

    def _count(self) -> None:
        counters, place = self._counters, self._place
        counters.num_blocks_offloaded = place.num_stored
        counters.num_states_offloaded = place.num_states_stored
        counters.num_blocks_corrupt = place.num_corrupt

    def count_transfers(self) -> None:
        """Other threads transfer, also where no step runs."""
        counters, transfers = self._counters, self._place.transfers
        counters.num_blocks_pulled = transfers.num_blocks_pulled
        counters.num_bytes_pulled = transfers.num_bytes_pulled
        counters.num_pulls_failed = transfers.num_pulls_failed
        counters.num_blocks_sent = transfers.num_blocks_sent
        counters.num_bytes_sent = transfers.num_bytes_sent

    def fetch(self, beginning: Beginning) -> Future[None] | None:
        """See BlockOffload."""
        return self._place.fetch(beginning)

    def suspend(self) -> None:
        """Nothing comes back until the next flush: a block that is to be filled may have content
        that has to be moved first, or a block could not be loaded.
        """
        self._is_suspended = True

    def blocks_for(self, request: Request) -> Container[bytes]:
        """The names of the blocks that can come back for a waiting request (name_in_group)."""
        may_ask = request.adapter is None and not self._is_suspended
        return self._place.kept_blocks() if may_ask else ()

    def count_to_state(self, request: Request, names: Sequence[bytes]) -> int:
        """How many of these names of blocks there are up to the last one at whose end a state is
        kept, from which a waiting request can start.
        """
        may_ask = names and request.adapter is None and not self._is_suspended
        return self._place.count_to_state(names) if may_ask else 0

    def load_state(self, place: int, name: bytes) -> bool:
        """Fills a place. Returns False if that fails; then nothing comes back until the next
        flush.
        """
        self.flush()  # what the place had may be among the evicted states
        if not self._place.load_state(place, name):
            self._count()
            self.suspend()
            return False
        self._counters.num_states_reloaded += 1
        return True

    def load(self, blocks: Sequence[KVCacheBlock], names: Sequence[bytes]) -> bool:
        """Fills the blocks. Returns False if not all of them could be loaded; then nothing comes
        back until the next flush.
        """
        self.flush()  # these blocks may be among the evicted ones
        pairs = [(block.block_id, name) for block, name in zip(blocks, names, strict=True)]
        if not self._place.load(pairs):
            self._count()
            self.suspend()
            return False
        self._counters.num_blocks_reloaded += len(pairs)
        return True

    def record_query(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Counts a lookup of tokens that the cache does not have."""
        self._counters.external_prefix_cache_queries += num_queried_tokens
        self._counters.external_prefix_cache_hits += num_hit_tokens

    def store_all(
        self,
        blocks: Sequence[KVCacheBlock],
        states: Sequence[tuple[int, bytes]] = (),
        most_bytes: int = sys.maxsize,
    ) -> None:
        """Stores cached blocks, and states (place, name), before the cache is lost: of both the
        last ones, which were used last, and states in at most half of the room.
        """
        num_places = min(most_bytes // self._place.block_bytes, self._place.num_blocks)
        if states:
            num_states = min(len(states), num_places // 2 // self._place.blocks_per_state)
            self._evicted_states += states[len(states) - num_states :]
            num_places -= num_states * self._place.blocks_per_state
        for block in blocks[max(0, len(blocks) - num_places) :]:
            self.evict(block)
        self.flush()

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """See BlockOffload."""
        return self._place.take_changes()

    def forget(self, names: Collection[bytes]) -> None:
        """Blocks with these names, and the states at their ends, are not trusted."""
        lost = set(names)
        self._evicted = [pair for pair in self._evicted if pair[1] not in lost]
        self._evicted_states = [pair for pair in self._evicted_states if pair[1] not in lost]
        self._place.remove(list(names))

    def clear(self) -> None:
        """Forgets all blocks and states."""
        self._place.clear()
