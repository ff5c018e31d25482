"""A pool that reports what it forgets, and what it is about to overwrite."""

from quire.core.kv_cache.events import KVEvents
from quire.core.kv_cache.kv_cache_manager import WatchedBlockPool
from quire.core.kv_cache.offload import OffloadedBlocks
from quire.ipc.counters import EngineCounters
from quire.ipc.kv_events import GPU, AllBlocksCleared, BlockRemoved, hash_for_routers
from quire.ipc.models.kv_layout import KVLayout
from quire.tests.fake_offload import FakeOffload


def test_evicted_blocks_are_stored_and_removed_ones_are_not():
    place = FakeOffload(10, lambda: [[block] for block in range(5)])
    offload = OffloadedBlocks(place, counters := EngineCounters())
    events = KVEvents(KVLayout(16))
    pool = WatchedBlockPool(5, events, offload)
    names = [bytes([i]) * 32 for i in range(4)]
    blocks = pool.get_new_blocks(4)
    for block, name in zip(blocks, names):
        pool.cache(block, name)
    pool.uncache(blocks[3])
    pool.free_blocks(blocks[::-1])
    assert len(pool.get_new_blocks(2)) == 2  # the one without a name, and the third
    offload.flush()
    assert place.kept == {names[2]: [3]} and counters.num_blocks_offloaded == 1
    removed = [hash_for_routers(names[i]) for i in (3, 2)]
    assert events.take() == [AllBlocksCleared(), BlockRemoved(removed, GPU)]


def test_a_reset_clears_all_only_if_nothing_is_elsewhere():
    for place in (None, FakeOffload(1, list)):
        offload = None if place is None else OffloadedBlocks(place, EngineCounters())
        events = KVEvents(KVLayout(16))
        pool = WatchedBlockPool(3, events, offload)
        [block] = pool.get_new_blocks(1)
        pool.cache(block, b"n" * 32)
        assert not pool.reset_prefix_cache()
        pool.free_blocks([block])
        events.take()
        assert pool.reset_prefix_cache()
        [event] = events.take()
        assert isinstance(event, AllBlocksCleared if place is None else BlockRemoved)
