"""The blocks of the KV cache: free ones, reference counts, and look-up by content hash.

Must not know: requests, tokens, or the memory behind a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True, eq=False, repr=False)
class KVCacheBlock:
    """The state of one block.

    It is in the free list exactly while ref_cnt is 0, and has a hash exactly while the cache map
    has it.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None  # set when full and computed
    # its neighbours in the free list; the block itself while it is not in the list
    prev_free: KVCacheBlock = field(init=False)
    next_free: KVCacheBlock = field(init=False)

    def __post_init__(self) -> None:
        self.prev_free = self.next_free = self

    def __repr__(self) -> str:
        cached = "" if self.block_hash is None else f", cached as {self.block_hash.hex()[:8]}"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}{cached})"


Blocks = list[list[KVCacheBlock]]  # of each group of layers; equally long lists


class ParkedBlocks(NamedTuple):
    """Blocks that an ended request left for others. A reallocated block has lost its name."""

    blocks: Blocks
    names: list[tuple[KVCacheBlock, bytes]]  # a block's hash, or a name of its own if it has none
    own_names: frozenset[bytes]  # given by KVCacheManager.park


class FreeBlockQueue:
    """A doubly linked list through the blocks: O(1) at both ends, and O(1) removal in the middle,
    which a deque does not have.

    The front is taken first. Two sentinels avoid special cases.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]):
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free_blocks = 0
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        block = self._head.next_free
        if block is self._tail:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        block.prev_free = block.next_free = block
        self.num_free_blocks -= 1

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Appends in the given order."""
        for block in blocks:
            self._insert(self._tail.prev_free, block)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Prepends in the given order: the first of `blocks` is the next to be taken."""
        before = self._head
        for block in blocks:
            self._insert(before, block)
            before = block

    def _insert(self, before: KVCacheBlock, block: KVCacheBlock) -> None:
        after = before.next_free
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self.num_free_blocks += 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not self._tail:
            yield block
            block = block.next_free


class BlockPool:
    """Blocks 1 … num_blocks - 1 for allocation; block 0 is the null block, which pads tables.

    A freed block keeps its content and hash until its space is needed (lazy eviction). The order of
    the free list is the eviction order: blocks without a hash first, then the least recently freed;
    within a request its tail before its head, because a prefix is useful without its continuation
    and not the other way round.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks: must be at least 2 (one is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.null_block = KVCacheBlock(0)
        # by id, those that were ever allocated; the others are free, and created when needed
        self.blocks = [self.null_block]
        self._untouched = KVCacheBlock(num_blocks)  # represents the others in the free list
        self.free_queue = FreeBlockQueue([self._untouched])
        self._cached: dict[bytes, KVCacheBlock] = {}

    @property
    def num_free_blocks(self) -> int:
        num_untouched = self.num_blocks - len(self.blocks)
        return self.free_queue.num_free_blocks + num_untouched - (num_untouched > 0)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - 1 - self.num_free_blocks

    def free_block_ids(self) -> Iterator[int]:
        """The free blocks in the order in which they would be allocated."""
        for block in self.free_queue:
            if block is self._untouched:
                yield from range(len(self.blocks), self.num_blocks)
            else:
                yield block.block_id

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        return self._cached.get(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocates blocks from the front of the free list, evicting what they cached.

        Raises ValueError if there are too few.
        """
        if num_blocks > self.num_free_blocks:
            raise ValueError(f"{num_blocks} blocks wanted, {self.num_free_blocks} are free")
        blocks = [self._take() for _ in range(num_blocks)]
        for block in blocks:
            if block.block_hash is not None:
                self.uncache(block)
            block.ref_cnt = 1
        return blocks

    def _take(self) -> KVCacheBlock:
        block = self.free_queue.popleft()
        return self._create() if block is self._untouched else block

    def _create(self) -> KVCacheBlock:
        """A block that was never allocated."""
        block = KVCacheBlock(len(self.blocks))
        self.blocks.append(block)
        if len(self.blocks) < self.num_blocks:
            self.free_queue.prepend_n([self._untouched])
        return block

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more request holds these cached blocks; free ones leave the free list, so that they
        are not evicted.
        """
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One request releases these blocks, given tail first."""
        findable, useless = [], []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (useless if block.block_hash is None else findable).append(block)
        self.free_queue.prepend_n(useless)
        self.free_queue.append_n(findable)

    def cache(self, block: KVCacheBlock, block_hash: bytes) -> bool:
        """Makes a full, computed block findable by its hash; returns whether it was not before.

        A second block with the same content gets no hash: tables are append-only, so it cannot be
        replaced by the first one. It is evicted first.
        """
        if block.block_hash is None and block_hash not in self._cached:
            self._cached[block_hash] = block
            block.block_hash = block_hash
            return True
        return False

    def uncache(self, block: KVCacheBlock) -> None:
        """The block, if it was cached, can no longer be found."""
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            block.block_hash = None

    def reset_prefix_cache(self) -> bool:
        """Drops every hash if no request holds a block; returns whether it did."""
        if self.num_used_blocks:
            return False
        for block in list(self._cached.values()):
            self.uncache(block)
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError unless free + used == total, every free block is unreferenced and
        listed once, and the map agrees with the hashes.
        """
        free_ids = list(self.free_block_ids())
        free, cached = set(free_ids), self._cached
        if not len(free_ids) == len(free) == self.num_free_blocks:
            raise AssertionError(
                f"the free list counts {self.num_free_blocks} and holds {free_ids}"
            )
        if self.null_block.ref_cnt or self.null_block.block_hash or 0 in free:
            raise AssertionError(f"the null block was given away: {self.null_block}")
        lost = [
            block
            for block in self.blocks[1:]
            if block.ref_cnt < 0 or (block.ref_cnt == 0) != (block.block_id in free)
        ]
        if lost:
            raise AssertionError(f"neither free nor used, or both: {lost}")
        named = {block.block_hash: block for block in self.blocks if block.block_hash is not None}
        if named != cached:
            raise AssertionError(
                f"the cache map does not name the blocks that have a hash: "
                f"{named.keys() ^ cached.keys()}"
            )
