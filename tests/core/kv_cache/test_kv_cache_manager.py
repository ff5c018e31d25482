"""Blocks of requests: figures of vLLM's documentation, hits, eviction, failure, and an integrity
check that detects corruption.
"""

import pytest
from quire.core.kv_cache.kv_cache_manager import KVCacheManager
from quire.core.request import Request
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams


def make_request(request_id: str, prompt: list[int], cache_salt: str | None = None) -> Request:
    message = EngineCoreRequest(
        request_id,
        prompt,
        SamplingParams(temperature=0.0, seed=0, max_tokens=64),
        cache_salt=cache_salt,
    )
    return Request(message, max_model_len=4096)


def admit(
    manager: KVCacheManager, request: Request, num_tokens: int | None = None
) -> tuple[int, list[int] | None]:
    """Look up hits, allocate and compute up to num_tokens (default: all). Return (tokens hit, block
    ids).
    """
    blocks = manager.get_computed_blocks(request)
    num_hit = len(blocks) * manager.block_size
    num_new = (num_tokens or request.num_tokens) - num_hit
    block_ids = manager.allocate_slots(request, num_new, blocks)
    if block_ids is not None:
        request.num_computed_tokens = num_hit + num_new
        manager.cache_blocks(request, request.num_computed_tokens)
    return num_hit, block_ids


def free_order(manager: KVCacheManager) -> list[int]:
    return list(manager.block_pool.free_block_ids())


def test_figures_of_the_reference():
    manager = KVCacheManager(num_blocks=11, block_size=16)
    common = [token for token in range(3) for _ in range(16)]  # 48 tokens
    first, second = make_request("0", common + [3] * 7), make_request("1", common + [4] * 5)
    assert admit(manager, first) == (0, [1, 2, 3, 4])
    assert admit(manager, second) == (48, [1, 2, 3, 5])
    assert manager.get_block_ids("1") == [1, 2, 3, 5]
    manager.check_integrity([first, second])
    manager.free(first)
    manager.free(second)
    assert free_order(manager) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    manager.check_integrity([])


def test_seventeen_tokens_twice_hit_sixteen():
    manager = KVCacheManager(11, 16)
    assert admit(manager, make_request("0", list(range(17))))[0] == 0
    assert admit(manager, make_request("1", list(range(17))))[0] == 16


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)]
)
def test_a_fully_cached_prompt_recomputes_its_last_block(num_tokens, num_hit):
    manager = KVCacheManager(32, 16)
    admit(manager, make_request("0", list(range(num_tokens))))
    request = make_request("1", list(range(num_tokens)))
    assert admit(manager, request)[0] == num_hit
    assert (
        manager.get_block_ids("1")[: num_hit // 16] == manager.get_block_ids("0")[: num_hit // 16]
    )
    # append-only: the duplicate block is not replaced
    assert not set(manager.get_block_ids("1")[num_hit // 16 :]) & set(manager.get_block_ids("0"))


def test_the_table_grows_by_whole_blocks_and_only_when_needed():
    manager = KVCacheManager(11, 16)
    request = make_request("0", list(range(20)))
    assert admit(manager, request)[1] == [1, 2]
    for _ in range(12):  # tokens 21 … 32 fit the second block
        request.append_output_token(7)
        assert manager.allocate_slots(request, 1) == []
        request.num_computed_tokens += 1
    assert manager.allocate_slots(request, 1) == [3]


def test_a_failed_allocation_changes_nothing():
    manager = KVCacheManager(5, 16)
    first = make_request("0", list(range(33)))
    assert admit(manager, first) == (0, [1, 2, 3])
    # hits 32 tokens and needs two more blocks, but only one is free
    second = make_request("1", list(range(32)) + [99] * 17)
    before = free_order(manager)
    assert admit(manager, second) == (32, None)
    assert free_order(manager) == before and manager.get_block_ids("1") == []
    manager.check_integrity([first])


def test_a_hit_on_a_free_block_uses_up_a_free_block():
    manager = KVCacheManager(5, 16)
    first = make_request("0", list(range(48)))
    admit(manager, first)
    manager.free(first)
    assert manager.num_free_blocks == 4
    held = make_request("held", [7] * 16)
    admit(manager, held)  # three blocks are left, all of them cached
    # 3 hits and 2 new ones: five blocks, but there are three
    again = make_request("1", list(range(48)) + [5] * 32)
    assert admit(manager, again) == (48, None)
    manager.check_integrity([held])


def test_eviction_takes_the_tail_first_so_that_the_head_still_hits():
    manager = KVCacheManager(5, 16)
    first = make_request("0", list(range(64)))
    admit(manager, first)
    manager.free(first)
    other = make_request("1", [99] * 16)
    assert admit(manager, other) == (0, [4])  # the last block of the first request
    assert len(manager.get_computed_blocks(make_request("2", list(range(64))))) == 3


def test_blocks_are_cached_when_computed_not_when_allocated():
    manager = KVCacheManager(11, 16)
    request = make_request("0", list(range(64)))
    assert manager.allocate_slots(request, 64) == [1, 2, 3, 4]
    assert manager.get_computed_blocks(make_request("1", list(range(64)))) == []
    manager.cache_blocks(request, 40)  # a chunk of 40 tokens: two full blocks
    assert len(manager.get_computed_blocks(make_request("1", list(range(64))))) == 2


def test_output_tokens_are_cached():
    manager = KVCacheManager(11, 16)
    request = make_request("0", list(range(10)))
    admit(manager, request)
    for token_id in range(10, 17):
        request.append_output_token(token_id)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        manager.cache_blocks(request, request.num_computed_tokens)
    manager.free(request)
    assert len(manager.get_computed_blocks(make_request("1", list(range(17))))) == 1


def test_salts_do_not_share():
    manager = KVCacheManager(11, 16)
    admit(manager, make_request("0", [1] * 17, cache_salt="a"))
    assert admit(manager, make_request("1", [1] * 17, cache_salt="b"))[0] == 0
    assert admit(manager, make_request("2", [1] * 17))[0] == 0
    assert admit(manager, make_request("3", [1] * 17, cache_salt="a"))[0] == 16


def test_without_caching_there_are_no_hits():
    manager = KVCacheManager(11, 16, enable_caching=False)
    request = make_request("0", [1] * 33)
    admit(manager, request)
    assert admit(manager, make_request("1", [1] * 33))[0] == 0
    assert manager.block_pool.num_cached_blocks == 0 and request.block_hashes == []


def test_blocks_of_a_failed_request_are_not_found_again():
    manager = KVCacheManager(11, 16)
    good, bad = make_request("0", [1] * 40), make_request("1", [2] * 40)
    admit(manager, good)
    admit(manager, bad)
    manager.discard(bad)
    assert manager.get_computed_blocks(make_request("2", [2] * 40)) == []
    assert len(manager.get_computed_blocks(make_request("3", [1] * 40))) == 2
    manager.check_integrity([good])


def test_a_hit_does_not_bring_back_what_was_discarded():
    manager = KVCacheManager(11, 16)
    bad, other = make_request("0", [1] * 40), make_request("1", [1] * 40)
    admit(manager, bad)
    manager.allocate_slots(other, 8, manager.get_computed_blocks(other))
    other.num_computed_tokens = 40
    manager.discard(bad)
    manager.cache_blocks(other, 40)
    assert manager.get_computed_blocks(make_request("2", [1] * 40)) == []
    manager.check_integrity([other])


def test_usage_and_reset():
    manager = KVCacheManager(11, 16)
    request = make_request("0", [1] * 33)
    admit(manager, request)
    assert manager.usage == 0.3 and manager.reset_prefix_cache() is False
    manager.free(request)
    assert manager.usage == 0.0 and manager.reset_prefix_cache() is True
    assert manager.get_computed_blocks(make_request("1", [1] * 33)) == []


def test_integrity_check_detects_inconsistent_tables_and_counts():
    manager = KVCacheManager(11, 16)
    request, ghost = make_request("0", [1] * 33), make_request("1", [2] * 5)
    admit(manager, request)
    manager.check_integrity([request])
    with pytest.raises(AssertionError, match="tables of"):
        manager.check_integrity([request, ghost])
    request.num_computed_tokens = 60
    with pytest.raises(AssertionError, match="has a table of 3 blocks"):
        manager.check_integrity([request])
    request.num_computed_tokens = 33
    manager.block_pool.blocks[1].ref_cnt = 2
    with pytest.raises(
        AssertionError,
        match=r"number of tables they are in: \{KVCacheBlock\(1, ref_cnt=2, cached as \w+\): 1\}",
    ):
        manager.check_integrity([request])
