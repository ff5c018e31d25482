"""Where a request starts and whether it fits, tested on the two functions alone."""

from quire.core.forks import Family
from quire.core.kv_cache.kv_cache_manager import KVCacheManager
from quire.core.request import Request, RequestStatus
from quire.core.scheduling.admission import StartPoint, find_start, has_room, num_missing_blocks
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.models.kv_layout import KVLayout
from quire.ipc.params import SamplingParams

LAYOUT = KVLayout(16)


def request(name: str, num_tokens: int, first: int = 0, arrival: int = 0) -> Request:
    message = EngineCoreRequest(
        name, [(first + i) % 90 for i in range(num_tokens)], SamplingParams(seed=0, max_tokens=5)
    )
    return Request(message, max_model_len=500, key=(0, arrival))


def compute(manager: KVCacheManager, request: Request) -> None:
    manager.begin(request, request.num_tokens, manager.no_blocks(), 0)
    request.num_computed_tokens = request.num_executed_tokens = request.num_tokens
    manager.cache_blocks(request, request.num_tokens)


def test_a_request_starts_behind_its_cached_tokens():
    manager, first, second = KVCacheManager(20, LAYOUT), request("a", 40), request("b", 40)
    assert find_start(manager, second) == StartPoint(0, [[]])
    compute(manager, first)
    start = find_start(manager, second)
    assert (start.num_tokens, [b.block_id for b in start.blocks[0]], start.source) == (
        32,
        manager.get_block_ids("a")[:2],
        None,
    )


def test_a_swapped_request_starts_where_it_was():
    manager, swapped = KVCacheManager(20, LAYOUT, False, 10), request("a", 40)
    compute(manager, swapped)
    manager.swap_out(swapped)
    swapped.num_computed_tokens, swapped.num_swapped_tokens = 0, 40
    assert find_start(manager, swapped) == StartPoint(40, [[]])


def test_a_sibling_waits_for_the_prompt_and_then_starts_at_its_last_token():
    manager = KVCacheManager(20, LAYOUT, enable_caching=False)
    members = [request(str(i), 40, arrival=i) for i in range(3)]
    family = Family("r", members)
    for member in members:
        member.family = family
    assert find_start(manager, members[0]) == StartPoint(0, [[]])
    assert find_start(manager, members[1]) is None
    compute(manager, members[0])
    members[0].status = RequestStatus.RUNNING
    family.note_start(members[0])
    start = find_start(manager, members[2])
    table = manager.get_block_ids("0")
    assert (start.num_tokens, [b.block_id for b in start.blocks[0]], start.source[0].block_id) == (
        39,
        table[:2],
        table[2],
    )
    family.leave(members[0])
    manager.free(members[0])
    assert find_start(manager, members[1]) == StartPoint(0, [[]])
    assert find_start(manager, members[2]) is None


def test_admission_needs_blocks_for_the_whole_prompt_and_the_demand_of_others():
    manager = KVCacheManager(11, LAYOUT)  # ten can be allocated
    running, new = request("a", 80), request("b", 96, first=7)
    manager.begin(running, 32, manager.no_blocks(), 0)  # two of its five blocks
    running.num_computed_tokens = 32
    # 8 are free, 3 of them reserved, 6 needed
    assert num_missing_blocks(LAYOUT, running) == 3
    assert not has_room(manager, 3, new, StartPoint(0, [[]]))
    assert has_room(manager, 3, request("c", 80), StartPoint(0, [[]]))
    assert has_room(manager, 0, new, StartPoint(0, [[]]))
