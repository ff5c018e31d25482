"""A block pool that reports what it forgets: to those who publish events, and to the place where
evicted blocks go.

Must not know: requests, tokens, what is done with the reports.
"""

from __future__ import annotations

from .block_pool import BlockPool, KVCacheBlock
from .events import KVEvents
from .offload import OffloadedBlocks


class WatchedBlockPool(BlockPool):
    """What it caches is reported by KVCacheManager, which knows the tokens."""

    def __init__(self, num_blocks: int, events: KVEvents | None, offload: OffloadedBlocks | None):
        super().__init__(num_blocks)
        self._events, self._offload = events, offload

    def _take(self) -> KVCacheBlock:
        block = super()._take()
        if self._offload is not None:
            self._offload.evict(block)
        return block

    def uncache(self, block: KVCacheBlock) -> None:
        name = block.block_hash
        super().uncache(block)
        if name is not None:
            if self._offload is not None:
                self._offload.note_forgotten(name)
            if self._events is not None:
                self._events.removed(name)

    def reset_prefix_cache(self) -> bool:
        was_reset = super().reset_prefix_cache()
        # what is elsewhere can still be found
        if was_reset and self._events is not None and self._offload is None:
            self._events.cleared()
        return was_reset
