"""Where checkpoints of states are taken, which of them stay, and what becomes of their places."""

from __future__ import annotations

import pytest
from quire.core.forks import Family
from quire.core.kv_cache.offload import OffloadedBlocks
from quire.core.kv_cache.state_checkpoints import LEAST_TOKENS, StateCheckpoints
from quire.core.lora_slots import Adapter
from quire.core.request import Request
from quire.ipc.counters import EngineCounters
from quire.ipc.lora import LoRARequest
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams
from quire.tests.fake_offload import FakeOffload

BLOCK, INTERVAL, FIRST = 16, 256, 8


class Places:
    """Checkpoints, and requests that compute tokens one after another."""

    def __init__(self, num_places: int = 20, interval: int = INTERVAL, *, is_cache: bool = True):
        self.counters = EngineCounters()
        self.elsewhere = FakeOffload(1000, list, lambda: [0] * (FIRST + num_places))
        self.offload = OffloadedBlocks(self.elsewhere, self.counters)
        self.checkpoints = StateCheckpoints(
            range(FIRST, FIRST + num_places),
            BLOCK,
            interval,
            self.counters,
            is_cache=is_cache,
            offload=self.offload,
        )
        self.running: list[Request] = []

    def begin(self, token_ids: list[int], num_prompt: int, start: int = 0, shared: int = 0):
        params = SamplingParams(max_tokens=5000)
        message = EngineCoreRequest(f"r{len(self.running)}", token_ids[:num_prompt], params)
        request = Request(message, 10**6)
        request.token_ids += token_ids[num_prompt:]
        self.checkpoints.begin(request, start, shared)
        self.running.append(request)
        return request

    def compute(self, request: Request, first: int, end: int) -> tuple[int, int] | None:
        """One row whose step runs at once."""
        taken = self.checkpoints.take(request, first, end)
        self.checkpoints.note_executed(request, end)
        self.check()
        return taken

    def check(self) -> None:
        self.checkpoints.check_integrity(self.running, [])

    def end(self, request: Request) -> None:
        self.checkpoints.end(request)
        self.running.remove(request)
        self.check()

    def depths(self) -> list[int]:
        """The tokens before each checkpoint, the least recently used first."""
        return [checkpoint.num_tokens for checkpoint in self.checkpoints._named.values()]


def prefill(places: Places, request: Request, num_tokens: int = 4096, first: int = 0) -> list[int]:
    """Compute all known tokens in rows of at most `num_tokens`; return where the rows end."""
    ends = []
    while first < request.num_tokens:
        wanted = min(num_tokens, request.num_tokens - first)
        end = first + places.checkpoints.fit(request, first, wanted)
        places.compute(request, first, end)
        ends.append(first := end)
    return ends


def decode(places: Places, request: Request, first: int, end: int) -> None:
    for position in range(first, end):
        places.compute(request, position, position + 1)


@pytest.mark.parametrize(
    ("num_prompt", "ends", "depths"),
    [
        (63, [63], []),
        (64, [64], []),  # one token of the same prompt is left to compute, and so a block
        (65, [65], [64]),
        (256, [256], [240]),
        (257, [257], [256]),
        (300, [300], [256]),  # the last block ends 32 tokens later, which is not worth a place
        (330, [256, 330], [256, 320]),
        (1000, [256, 512, 768, 1000], [256, 512, 768, 992]),
    ],
)
def test_a_prompt_has_them_at_the_interval_and_at_its_end(num_prompt, ends, depths):
    places = Places()
    request = places.begin(list(range(num_prompt)), num_prompt)
    assert prefill(places, request) == ends
    assert places.depths() == depths
    assert places.counters.num_states_saved == len(depths)


def test_a_row_ends_at_a_checkpoint_only_if_it_would_take_two():
    places = Places()
    request = places.begin(list(range(1000)), 1000)
    assert prefill(places, request, 200) == [200, 400, 600, 800, 1000]
    request = places.begin(list(range(1, 1000)), 999)
    assert prefill(places, request, 300) == [300, 600, 900, 999]


def test_where_checkpoints_are_already_no_row_ends():
    places = Places()
    first = places.begin(list(range(1000)), 1000)
    prefill(places, first)
    num_saved = places.counters.num_states_saved
    second = places.begin([*range(1000)], 1000)
    assert prefill(places, second) == [1000]
    assert places.counters.num_states_saved == num_saved


def test_a_prompt_has_one_where_it_leaves_the_blocks_of_others():
    places = Places()
    request = places.begin(list(range(250)), 250, shared=112)
    assert prefill(places, request) == [112, 250]
    assert places.depths() == [112, 240]
    request = places.begin(list(range(7, 250)), 243, shared=48)  # too short
    assert prefill(places, request) == [243]


def test_the_output_has_one_at_the_interval_and_one_that_moves():
    places = Places()
    request = places.begin(list(range(900)), 100)
    prefill_ends = places.compute(request, 0, 100)
    assert prefill_ends == (96, FIRST)
    decode(places, request, 100, 159)
    assert places.depths() == [96]  # the next one is not worth a place
    decode(places, request, 159, 200)
    assert places.depths() == [96, 192]
    decode(places, request, 200, 255)
    assert places.depths() == [96, 240]
    decode(places, request, 255, 300)
    assert places.depths() == [96, 256]
    decode(places, request, 300, 600)
    assert places.depths() == [96, 256, 512, 592]
    places.end(request)
    assert places.depths() == [96, 256, 512, 592]


def test_the_one_that_moves_stays_where_a_request_has_started():
    places = Places()
    request = places.begin(list(range(900)), 100)
    places.compute(request, 0, 100)
    decode(places, request, 100, 192)
    found = places.checkpoints.find(request.extend_block_hashes(BLOCK)[:15])
    assert found is not None and found.num_tokens == 192
    places.checkpoints.use(found)
    decode(places, request, 192, 240)
    assert sorted(places.depths()) == [96, 192, 240]
    assert places.counters.num_states_restored == 1


def test_a_burst_takes_one_inside_it():
    places = Places()
    request = places.begin(list(range(900)), 100)
    places.compute(request, 0, 100)
    assert places.checkpoints.take(request, 155, 163) == (160, FIRST + 1)
    assert places.checkpoints.take(request, 163, 171) is None
    places.checkpoints.note_executed(request, 163)
    assert places.depths() == [96, 160]
    # the interval goes before the end of the last block
    assert places.checkpoints.take(request, 250, 290) == (256, FIRST + 2)


def test_one_is_found_when_its_step_has_run():
    places = Places()
    request = places.begin(list(range(300)), 300)
    taken = places.checkpoints.take(request, 0, 300)
    assert taken == (256, FIRST)
    names = request.extend_block_hashes(BLOCK)
    assert places.checkpoints.find(names) is None
    places.check()
    places.checkpoints.note_executed(request, 300)
    found = places.checkpoints.find(names)
    assert found is not None and (found.num_tokens, found.place) == (256, FIRST)
    assert places.checkpoints.find(names[:15]) is None


def test_what_a_step_writes_for_a_request_that_ended_is_not_found():
    places = Places(1)
    request = places.begin(list(range(300)), 300)
    assert places.checkpoints.take(request, 0, 300) == (256, FIRST)
    places.end(request)
    assert places.depths() == []
    again = places.begin(list(range(300)), 300)
    assert places.compute(again, 0, 300) == (256, FIRST)


def test_the_least_recently_used_makes_room():
    places = Places(2)
    prompts = [list(range(i, i + 100)) for i in (0, 200, 400)]
    requests = [places.begin(prompt, 100) for prompt in prompts[:2]]
    for request in requests:
        places.compute(request, 0, 100)
    first = places.checkpoints.find(requests[0].block_hashes)
    assert first is not None
    places.checkpoints.use(first)
    third = places.begin(prompts[2], 100)
    assert places.compute(third, 0, 100) == (96, FIRST + 1)
    assert places.checkpoints.find(requests[0].block_hashes) is first
    assert places.checkpoints.find(requests[1].block_hashes) is None
    assert places.counters.num_states_evicted == 1


def test_those_between_others_are_seldom_kept_elsewhere():
    """The end of a prompt, one that a request has started from, and every eighth."""
    places = Places()
    request = places.begin(list(range(4200)), 4200)
    prefill(places, request)
    places.checkpoints.use(places.checkpoints.find(request.block_hashes[:32]))
    places.end(request)
    worth = {name for _, name in places.checkpoints.kept()}
    assert worth == {request.block_hashes[end // BLOCK - 1] for end in (512, 2048, 4096, 4192)}
    other = places.begin(list(range(1, 100)), 99)
    for _ in range(20):
        assert places.checkpoints._take_place() is not None
    places.offload.flush()
    assert places.elsewhere.kept_states.keys() == worth
    assert places.counters.num_states_offloaded == 4 and other in places.running


def test_those_of_an_adapter_are_not_kept_elsewhere():
    places = Places(1)
    request = places.begin(list(range(100)), 100)
    request.adapter = Adapter(LoRARequest("a", 1, "/a"), 1)
    places.compute(request, 0, 100)
    assert places.depths() == [96] and places.checkpoints.kept() == []
    assert places.checkpoints.park(request) == FIRST
    places.offload.flush()
    assert places.counters.num_states_evicted == 1 and not places.elsewhere.kept_states


def test_one_that_comes_back_takes_no_place_that_is_copied_from():
    places = Places(2)
    requests = [places.begin(list(range(i, i + 100)), 100) for i in (0, 200, 400)]
    for request in requests:
        places.compute(request, 0, 100)
    places.offload.flush()
    name = requests[0].block_hashes[5]
    assert places.offload.count_to_state(requests[0], requests[0].block_hashes) == 6
    assert places.checkpoints.load(name, 96, {FIRST, FIRST + 1}) is None
    loaded = places.checkpoints.load(name, 96, {FIRST + 1})
    assert loaded is not None and loaded.place == FIRST
    assert places.checkpoints.find(requests[0].block_hashes) is loaded
    places.elsewhere.loss = 1.0
    assert places.checkpoints.load(requests[1].block_hashes[5], 96, ()) is None
    places.check()


def test_without_places_none_is_taken():
    places = Places(0)
    request = places.begin(list(range(300)), 300)
    assert places.compute(request, 0, 300) is None
    assert places.checkpoints.park(request) is None


def test_places_that_steps_write_and_parked_states_are_not_given_away():
    places = Places(2)
    one, two, three = (places.begin(list(range(i, i + 100)), 100) for i in (0, 200, 400))
    assert places.checkpoints.take(one, 0, 100) == (96, FIRST)
    assert places.checkpoints.park(two) == FIRST + 1
    assert places.checkpoints.take(three, 0, 100) is None
    assert places.checkpoints.unpark(two) == FIRST + 1
    assert places.checkpoints.unpark(two) is None
    assert places.checkpoints.take(three, 0, 100) == (96, FIRST + 1)


def test_a_failed_request_leaves_none_that_it_had_or_began_with():
    places = Places()
    one = places.begin(list(range(300)), 300)
    places.compute(one, 0, 300)
    other = places.begin(list(range(5, 300)), 295)
    places.compute(other, 0, 295)
    failed = places.begin(list(range(400)), 400, start=256)
    places.compute(failed, 256, 400)
    assert sorted(places.depths()) == [256, 256, 384]
    places.checkpoints.discard(failed)
    assert places.depths() == [256]
    assert places.checkpoints.find(other.block_hashes) is not None


@pytest.mark.parametrize("is_cache", [True, False])
def test_one_of_a_prompt_is_kept_for_its_other_completions(is_cache):
    places = Places(1, is_cache=is_cache)
    request, sibling = (places.begin(list(range(100)), 100) for _ in range(2))
    family = request.family = sibling.family = Family("f", [request, sibling])
    places.compute(request, 0, 100)
    shared = places.checkpoints.shared_by(family)
    assert shared is not None and (shared.num_tokens, shared.place) == (96, FIRST)
    assert places.checkpoints.park(sibling) is None  # its only place is taken
    places.checkpoints.unshare(family)
    places.check()
    assert places.depths() == ([96] if is_cache else [])


def test_one_of_an_output_is_not_kept_for_other_completions():
    """A completion that was preempted may begin with a checkpoint of its own output."""
    places = Places()
    request, sibling = (places.begin(list(range(300)), 90) for _ in range(2))
    family = request.family = sibling.family = Family("f", [request, sibling])
    places.compute(request, 0, 90)
    decode(places, request, 90, 150)
    deepest = places.checkpoints.find(request.block_hashes)
    assert deepest is not None and deepest.num_tokens == 144
    places.checkpoints.share(request, deepest)
    shared = places.checkpoints.shared_by(family)
    assert shared is not None and shared.num_tokens == 80


def test_without_a_prefix_cache_a_request_takes_none():
    places = Places(is_cache=False)
    request = places.begin(list(range(900)), 300)
    assert prefill(places, request) == [900]
    assert places.depths() == []


def test_clearing_keeps_parked_states():
    places = Places()
    one, two = (places.begin(list(range(i, i + 100)), 100) for i in (0, 200))
    places.compute(one, 0, 100)
    place = places.checkpoints.park(two)
    places.checkpoints.clear()
    assert places.depths() == [] and places.checkpoints.unpark(two) == place


def test_two_requests_that_write_the_same_state_leave_one():
    places = Places()
    one, two = (places.begin(list(range(100)), 100) for _ in range(2))
    for request in (one, two):
        assert places.checkpoints.take(request, 0, 100) is not None
    for request in (one, two):
        places.checkpoints.note_executed(request, 100)
    places.check()
    assert places.depths() == [96]


def test_a_lost_place_is_found():
    places = Places()
    places.checkpoints._free.pop()
    with pytest.raises(AssertionError, match="lost, or held twice"):
        places.check()


def test_the_least_length_is_that_of_short_prompts():
    assert LEAST_TOKENS == 64  # the lengths above follow from it
    places = Places(interval=32)  # an interval below it is meant so
    request = places.begin(list(range(70)), 70)
    assert prefill(places, request) == [32, 70]
    assert places.depths() == [32, 64]
