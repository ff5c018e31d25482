"""The block pool: order of the free list, reference counts, lazy eviction, and an integrity check
that detects corruption.
"""

import random

import pytest
from quire.core.kv_cache.block_pool import BlockPool, FreeBlockQueue, KVCacheBlock


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def test_free_queue_keeps_its_order():
    blocks = [KVCacheBlock(i) for i in range(6)]
    queue = FreeBlockQueue(blocks[:3])
    queue.append_n([blocks[3]])
    queue.prepend_n([blocks[5], blocks[4]])
    assert ids(queue) == [5, 4, 0, 1, 2, 3]
    queue.remove(blocks[1])
    assert ids(queue) == [5, 4, 0, 2, 3]
    assert queue.popleft() is blocks[5]
    assert queue.num_free_blocks == 4
    for _ in range(4):
        queue.popleft()
    with pytest.raises(IndexError):
        queue.popleft()


def test_free_queue_agrees_with_a_list():
    rng = random.Random(0)
    blocks = [KVCacheBlock(i) for i in range(20)]
    queue, model, outside = FreeBlockQueue(blocks[:10]), blocks[:10], blocks[10:]
    for _ in range(2000):
        action = rng.choice(["pop", "remove", "append", "prepend"])
        if action == "pop" and model:
            outside.append(queue.popleft())
            assert outside[-1] is model.pop(0)
        elif action == "remove" and model:
            block = model.pop(rng.randrange(len(model)))
            queue.remove(block)
            outside.append(block)
        elif action in ("append", "prepend"):
            rng.shuffle(outside)
            moved, outside = outside[:3], outside[3:]
            model = model + moved if action == "append" else moved + model
            (queue.append_n if action == "append" else queue.prepend_n)(moved)
        assert list(queue) == model and queue.num_free_blocks == len(model)


def test_block_zero_is_never_allocated_and_blocks_come_in_order():
    pool = BlockPool(5)
    assert ids(pool.get_new_blocks(4)) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="1 blocks wanted, 0 are free"):
        pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(1)


def test_unused_blocks_take_no_memory():
    pool = BlockPool(10**12)
    assert pool.num_free_blocks == 10**12 - 1 and ids(pool.get_new_blocks(3)) == [1, 2, 3]
    pool.free_blocks([pool.blocks[2]])
    assert ids(pool.get_new_blocks(2)) == [2, 4]
    assert pool.num_used_blocks == 4 and len(pool.blocks) == 5


def test_uncached_blocks_are_reused_first_and_a_tail_before_its_head():
    pool = BlockPool(8)
    blocks = pool.get_new_blocks(5)  # 1 … 5; 6 and 7 stay free
    for block in blocks[:3]:
        pool.cache(block, b"hash %d" % block.block_id)
    pool.free_blocks(reversed(blocks))
    assert list(pool.free_block_ids()) == [5, 4, 6, 7, 3, 2, 1]
    pool.check_integrity()


def test_a_freed_block_can_be_found_until_it_is_evicted():
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    pool.cache(block, b"h")
    pool.free_blocks([block])
    assert pool.get_cached_block(b"h") is block and pool.num_free_blocks == 3
    pool.get_new_blocks(2)
    assert pool.get_cached_block(b"h") is block
    assert pool.get_new_blocks(1) == [block]
    assert pool.get_cached_block(b"h") is None and block.block_hash is None


def test_touch_removes_a_free_block_from_the_list_and_counts_references():
    pool = BlockPool(4)
    (block,) = pool.get_new_blocks(1)
    pool.cache(block, b"h")
    pool.touch([block])
    assert block.ref_cnt == 2
    pool.free_blocks([block])
    assert pool.num_free_blocks == 2  # one reference is left
    pool.free_blocks([block])
    assert pool.num_free_blocks == 3
    pool.touch([block])
    assert block.ref_cnt == 1 and list(pool.free_block_ids()) == [2, 3]
    pool.check_integrity()


def test_a_duplicate_block_is_not_cached():
    pool = BlockPool(4)
    first, duplicate = pool.get_new_blocks(2)
    pool.cache(first, b"same")
    pool.cache(duplicate, b"same")
    assert pool.get_cached_block(b"same") is first and duplicate.block_hash is None
    pool.free_blocks([first])
    pool.free_blocks([duplicate])
    assert list(pool.free_block_ids()) == [2, 3, 1]


def test_reset_only_if_no_block_is_in_use():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache(blocks[0], b"h")
    assert pool.reset_prefix_cache() is False and pool.num_cached_blocks == 1
    pool.free_blocks(reversed(blocks))
    assert pool.reset_prefix_cache() is True and pool.num_cached_blocks == 0
    assert pool.get_cached_block(b"h") is None
    pool.check_integrity()


def _leak(pool, held):
    held.ref_cnt = 0


def _free_while_held(pool, held):
    pool.free_queue.append_n([held])


def _lose_a_free_block(pool, held):
    pool.free_queue.popleft()


def _miscount(pool, held):
    pool.free_queue.num_free_blocks += 1


def _forget_the_map(pool, held):
    pool._cached.clear()


def _change_a_hash(pool, held):
    pool._cached[b"other"] = held


def _go_negative(pool, held):
    held.ref_cnt = -1


def _give_the_null_block(pool, held):
    pool.null_block.ref_cnt = 1


@pytest.mark.parametrize(
    "damage",
    [
        _leak,
        _free_while_held,
        _lose_a_free_block,
        _miscount,
        _forget_the_map,
        _change_a_hash,
        _go_negative,
        _give_the_null_block,
    ],
)
def test_integrity_check_detects_corruption(damage):
    pool = BlockPool(6)
    held = pool.get_new_blocks(2)[0]
    pool.cache(held, b"h")
    pool.check_integrity()
    damage(pool, held)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_random_use_keeps_integrity():
    rng = random.Random(1)
    pool, tables = BlockPool(24), []
    for step in range(1500):
        if rng.random() < 0.55 and pool.num_free_blocks >= 4:
            hits = list(
                dict.fromkeys(
                    b
                    for b in (pool.get_cached_block(b"%d" % rng.randrange(12)) for _ in range(2))
                    if b is not None
                )
            )
            pool.touch(hits)
            tables.append(
                hits + pool.get_new_blocks(min(rng.randrange(1, 4), pool.num_free_blocks))
            )
            for block in tables[-1][len(hits) :]:
                if rng.random() < 0.6:
                    pool.cache(block, b"%d" % rng.randrange(12))
        elif tables:
            pool.free_blocks(reversed(tables.pop(rng.randrange(len(tables)))))
        pool.check_integrity()
        assert pool.num_used_blocks == len({id(block) for table in tables for block in table})
