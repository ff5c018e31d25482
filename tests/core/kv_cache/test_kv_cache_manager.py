"""Blocks of requests: figures of vLLM's documentation, hits, eviction, failure, and an integrity
check that detects corruption.
"""

import pytest
from quire.core.kv_cache.kv_cache_manager import KVCacheManager
from quire.core.request import Request
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.models.kv_layout import KVLayout
from quire.ipc.params import SamplingParams


def make_manager(
    num_blocks: int, windows: tuple[int, ...] = (0,), max_new_tokens: int = 16, **settings
) -> KVCacheManager:
    return KVCacheManager(num_blocks, KVLayout(16, windows, max_new_tokens), **settings)


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
    num_hit = len(blocks[0]) * manager.block_size
    num_new = (num_tokens or request.num_tokens) - num_hit
    block_ids = manager.begin(request, num_new, blocks, num_hit)
    if block_ids is not None:
        request.num_computed_tokens = num_hit + num_new
        manager.cache_blocks(request, request.num_computed_tokens)
    return num_hit, block_ids


def num_hits(manager: KVCacheManager, request: Request) -> int:
    return len(manager.get_computed_blocks(request)[0])


def free_order(manager: KVCacheManager) -> list[int]:
    return list(manager.block_pool.free_block_ids())


def test_figures_of_the_reference():
    manager = make_manager(11)
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
    manager = make_manager(11)
    assert admit(manager, make_request("0", list(range(17))))[0] == 0
    assert admit(manager, make_request("1", list(range(17))))[0] == 16


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32)]
)
def test_a_fully_cached_prompt_recomputes_its_last_block(num_tokens, num_hit):
    manager = make_manager(32)
    admit(manager, make_request("0", list(range(num_tokens))))
    request = make_request("1", list(range(num_tokens)))
    assert admit(manager, request)[0] == num_hit
    assert (
        manager.get_block_ids("1")[: num_hit // 16] == manager.get_block_ids("0")[: num_hit // 16]
    )
    # append-only: the duplicate block is not replaced
    assert not set(manager.get_block_ids("1")[num_hit // 16 :]) & set(manager.get_block_ids("0"))


def test_the_table_grows_by_whole_blocks_and_only_when_needed():
    manager = make_manager(11)
    request = make_request("0", list(range(20)))
    assert admit(manager, request)[1] == [1, 2]
    for _ in range(12):  # tokens 21 … 32 fit the second block
        request.append_output_token(7)
        assert manager.allocate_slots(request, 1) == []
        request.num_computed_tokens += 1
    assert manager.allocate_slots(request, 1) == [3]


def test_a_failed_allocation_changes_nothing():
    manager = make_manager(5)
    first = make_request("0", list(range(33)))
    assert admit(manager, first) == (0, [1, 2, 3])
    # hits 32 tokens and needs two more blocks, but only one is free
    second = make_request("1", list(range(32)) + [99] * 17)
    before = free_order(manager)
    assert admit(manager, second) == (32, None)
    assert free_order(manager) == before and manager.get_block_ids("1") == []
    manager.check_integrity([first])


def test_a_hit_on_a_free_block_uses_up_a_free_block():
    manager = make_manager(5)
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
    manager = make_manager(5)
    first = make_request("0", list(range(64)))
    admit(manager, first)
    manager.free(first)
    other = make_request("1", [99] * 16)
    assert admit(manager, other) == (0, [4])  # the last block of the first request
    assert num_hits(manager, make_request("2", list(range(64)))) == 3


def test_blocks_are_cached_when_computed_not_when_allocated():
    manager = make_manager(11)
    request = make_request("0", list(range(64)))
    assert manager.begin(request, 64, manager.no_blocks(), 0) == [1, 2, 3, 4]
    assert manager.get_computed_blocks(make_request("1", list(range(64)))) == [[]]
    manager.cache_blocks(request, 40)  # a chunk of 40 tokens: two full blocks
    assert num_hits(manager, make_request("1", list(range(64)))) == 2


def test_output_tokens_are_cached():
    manager = make_manager(11)
    request = make_request("0", list(range(10)))
    admit(manager, request)
    for token_id in range(10, 17):
        request.append_output_token(token_id)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        manager.cache_blocks(request, request.num_computed_tokens)
    manager.free(request)
    assert num_hits(manager, make_request("1", list(range(17)))) == 1


def test_salts_do_not_share():
    manager = make_manager(11)
    admit(manager, make_request("0", [1] * 17, cache_salt="a"))
    assert admit(manager, make_request("1", [1] * 17, cache_salt="b"))[0] == 0
    assert admit(manager, make_request("2", [1] * 17))[0] == 0
    assert admit(manager, make_request("3", [1] * 17, cache_salt="a"))[0] == 16


def test_without_caching_there_are_no_hits():
    manager = make_manager(11, enable_caching=False)
    request = make_request("0", [1] * 33)
    admit(manager, request)
    assert admit(manager, make_request("1", [1] * 33))[0] == 0
    assert manager.block_pool.num_cached_blocks == 0 and request.block_hashes == []


def test_blocks_of_a_failed_request_are_not_found_again():
    manager = make_manager(11)
    good, bad = make_request("0", [1] * 40), make_request("1", [2] * 40)
    admit(manager, good)
    admit(manager, bad)
    manager.discard(bad)
    assert manager.get_computed_blocks(make_request("2", [2] * 40)) == [[]]
    assert num_hits(manager, make_request("3", [1] * 40)) == 2
    manager.check_integrity([good])


def test_a_hit_does_not_bring_back_what_was_discarded():
    manager = make_manager(11)
    bad, other = make_request("0", [1] * 40), make_request("1", [1] * 40)
    admit(manager, bad)
    manager.begin(other, 8, manager.get_computed_blocks(other), 32)
    other.num_computed_tokens = 40
    manager.discard(bad)
    manager.cache_blocks(other, 40)
    assert manager.get_computed_blocks(make_request("2", [1] * 40)) == [[]]
    manager.check_integrity([other])


def test_usage_and_reset():
    manager = make_manager(11)
    request = make_request("0", [1] * 33)
    admit(manager, request)
    assert manager.usage == 0.3 and manager.reset_prefix_cache() is False
    manager.free(request)
    assert manager.usage == 0.0 and manager.reset_prefix_cache() is True
    assert manager.get_computed_blocks(make_request("1", [1] * 33)) == [[]]


def test_integrity_check_detects_inconsistent_tables_and_counts():
    manager = make_manager(11)
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


# ------------------------------------------------------------ groups of layers, and windows


def compute(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Compute this many more tokens of a running request, which must fit."""
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens += num_tokens
    manager.cache_blocks(request, request.num_computed_tokens)
    request.num_executed_tokens = request.num_computed_tokens


def kept(manager: KVCacheManager, request: Request) -> list[list[int]]:
    """Return the positions of each table that still have a block."""
    tables = manager._tables[request.request_id]
    null = manager.block_pool.null_block
    return [[i for i, block in enumerate(table) if block is not null] for table in tables]


def test_each_group_has_its_own_blocks():
    manager = make_manager(21, windows=(0, 40))
    request = make_request("0", list(range(33)))
    assert admit(manager, request) == (0, [1, 2, 3, 4, 5, 6])
    assert admit(manager, make_request("1", list(range(33)))) == (32, [1, 2, 7, 4, 5, 8])


def test_a_window_returns_the_blocks_that_it_has_left():
    manager = make_manager(101, windows=(0, 40))
    request = make_request("0", list(range(200)))
    admit(manager, request, 16)
    request.num_executed_tokens = 16
    for end in range(32, 201, 8):
        compute(manager, request, 8 if end > 32 else 16)
        assert kept(manager, request)[0] == list(range(-(-end // 16)))
        assert len(kept(manager, request)[1]) <= 4  # 40 - 1 + 8 tokens, anywhere in blocks
        manager.check_integrity([request])
    assert kept(manager, request)[1] == [9, 10, 11, 12]
    assert manager.num_blocks_of("0") == 13 + 4 == manager.block_pool.num_used_blocks
    manager.free(request)
    assert manager.usage == 0.0


def test_blocks_that_a_window_has_left_are_hits_until_their_memory_is_needed():
    manager = make_manager(101, windows=(0, 40))
    request = make_request("0", list(range(160)))
    admit(manager, request, 16)
    for _ in range(9):
        compute(manager, request, 16)
    again = make_request("1", list(range(80)) + [999] * 9)
    blocks = manager.get_computed_blocks(again)
    assert [len(row) for row in blocks] == [5, 5]
    # the token after 80 sees positions 41 to 80
    assert [block.block_id == 0 for block in blocks[1]] == [True, True, False, False, False]


def test_a_hit_needs_only_the_window_before_its_end():
    manager = make_manager(101, windows=(0, 33, 20))
    request = make_request("0", list(range(160)))
    admit(manager, request)
    tables = manager._tables["0"]
    assert num_hits(manager, make_request("1", list(range(160)))) == 9
    # both windows need the last two blocks of a hit
    for lost, num_hit in ((4, 9), (7, 7), (6, 4)):
        manager.block_pool.uncache(tables[1][lost])
        assert num_hits(manager, make_request("1", list(range(160)))) == num_hit
    manager.block_pool.uncache(tables[2][3])
    assert num_hits(manager, make_request("1", list(range(160)))) == 3
    manager.block_pool.uncache(tables[0][1])  # of the group that keeps everything
    assert num_hits(manager, make_request("1", list(range(160)))) == 1


def test_a_swapped_request_comes_back_with_what_it_sees():
    manager = make_manager(41, windows=(0, 40), enable_caching=False, num_host_blocks=20)
    request = make_request("0", list(range(120)))
    admit(manager, request, 16)
    for _ in range(6):
        compute(manager, request, 16)
    assert kept(manager, request)[1] == [3, 4, 5, 6]
    pairs = manager.swap_out(request)
    assert len(pairs) == 7 + 4 and len(manager._free_host_blocks) == 20 - 11
    request.num_computed_tokens, request.num_swapped_tokens = 0, 112
    manager.check_integrity([], [request])
    manager.begin(request, 8, manager.get_computed_blocks(request), 112)
    back = manager.swap_in(request, 0)
    # of the window's group, positions 73 to 111: the first block that was kept is no longer needed
    assert len(back) == 7 + 3 and {host for host, _ in back} <= {host for _, host in pairs}
    assert kept(manager, request) == [list(range(8)), [4, 5, 6, 7]]
    request.num_computed_tokens, request.num_swapped_tokens = 120, 0
    manager.check_integrity([request])
    assert len(manager._free_host_blocks) == 20


def test_integrity_check_detects_a_block_that_is_seen_and_gone():
    manager = make_manager(41, windows=(0, 40))
    request = make_request("0", list(range(100)))
    admit(manager, request)
    manager._release_before(manager._tables["0"], 99)
    manager.check_integrity([request])
    manager._release_before(manager._tables["0"], 130)
    with pytest.raises(AssertionError, match="lacks blocks that it sees"):
        manager.check_integrity([request])
