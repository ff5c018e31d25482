"""Which request is preempted and how: the policy alone, and the scheduler under memory pressure."""

import pytest
from quire.core.request import Request, RequestOwner
from quire.core.scheduling.preemption import PreemptionPolicy
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.models.kv_layout import KVLayout
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import PreemptionCosts
from quire.tests.core.scheduling.loop import Loop, distinct

# swapping is cheaper from 40 tokens on
OWNER = RequestOwner()
COSTS = PreemptionCosts(recompute_s_per_token=1.0, swap_s=20.0, swap_s_per_token=0.5)


def request(name: str, num_computed_tokens: int, priority: int = 0, arrival: int = 0) -> Request:
    message = EngineCoreRequest(name, [1], SamplingParams(seed=0, max_tokens=5))
    made = Request(message, max_model_len=100, key=(priority, arrival), owner=OWNER)
    made.num_computed_tokens = num_computed_tokens
    return made


@pytest.mark.parametrize(
    ("mode", "short", "long"),
    [("auto", False, True), ("swap", True, True), ("recompute", False, False)],
)
def test_each_request_is_preempted_in_the_cheaper_way(mode, short, long):
    policy = PreemptionPolicy(mode, COSTS, KVLayout(16))
    assert policy.prefers_swap(request("short", 39)) is short
    assert policy.prefers_swap(request("long", 41)) is long


def test_the_victim_is_the_cheapest_to_restore():
    policy = PreemptionPolicy("auto", COSTS, KVLayout(16))
    running = [request(str(i), n, arrival=i) for i, n in enumerate((5, 80, 30, 60, 30))]
    # of the two shortest, the last to arrive; never the head, though it is short
    assert policy.choose_victim(running, 1) == 4
    assert policy.choose_victim(running[:4], 1) == 2
    assert policy.choose_victim(running[:4], 3) == 3  # the earlier ones have a row in this step
    assert policy.choose_victim(running[:2], 1) == 1
    assert policy.choose_victim(running[:2], 0) == 1


def test_the_lowest_priority_is_preempted_first():
    running = [
        request("a", 90, 0, 2),
        request("b", 5, 0, 3),
        request("c", 90, 1, 0),
        request("d", 70, 1, 1),
    ]
    assert PreemptionPolicy("recompute", COSTS, KVLayout(16)).choose_victim(running, 0) == 3


def pressed(**arguments) -> Loop:
    """Three requests that do not fit together: 4 blocks each at the end, 8 in all."""
    settings = dict(num_gpu_blocks_override=9, max_model_len=128, enable_prefix_caching=False)
    loop = Loop(**{**settings, **arguments})
    for i, num_prompt in enumerate((32, 31, 30)):
        loop.add(str(i), distinct(i, num_prompt), max_tokens=24)
    return loop


def step_until_swapped(loop: Loop) -> None:
    for _ in range(100):
        if loop.state("swapped"):
            return
        loop.step()
    raise AssertionError("no request was swapped out")


def test_swapped_blocks_come_back_and_nothing_is_computed_twice():
    loop = pressed(preemption_mode="swap")
    step_until_swapped(loop)
    (swapped,) = loop.state("swapped")
    assert loop.scheduler.stats().num_swapped == 1
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.num_recomputed_tokens == 0
    assert stats.num_blocks_swapped_out == stats.num_blocks_swapped_in > 0
    computed = sum(step.total_num_scheduled_tokens for step in loop.executor.steps)
    assert computed == 32 + 31 + 30 + 3 * 23
    assert (
        swapped in loop.ends
        and len(loop.scheduler.kv_cache_manager._free_host_blocks) == loop.executor.num_host_blocks
    )


def test_recomputed_if_the_host_is_full():
    # host memory of the fake executor: one block
    loop = pressed(preemption_mode="swap", swap_space=1 / 1024)
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.num_recomputed_tokens > 0 and stats.num_blocks_swapped_out == 0


def test_cached_blocks_are_not_copied_in():
    loop = Loop(preemption_mode="swap", num_gpu_blocks_override=7, max_model_len=96)
    for i in range(2):  # they share their first block, which the running request keeps in place
        loop.add(str(i), distinct(0, 16) + distinct(5 + i, 15), max_tokens=40)
    loop.run()
    stats = loop.scheduler.stats()
    assert 0 < stats.num_blocks_swapped_in < stats.num_blocks_swapped_out


def test_a_swapped_request_can_be_aborted():
    loop = pressed(preemption_mode="swap")
    step_until_swapped(loop)
    (request_id,) = loop.state("swapped")
    assert [r.request_id for r in loop.scheduler.abort_requests([request_id], 0)] == [request_id]
    loop.scheduler.check_integrity()
    loop.run()
    assert len(loop.scheduler.kv_cache_manager._free_host_blocks) == loop.executor.num_host_blocks


def test_preempt_all_discards_swapped_blocks():
    loop = pressed(preemption_mode="swap")
    step_until_swapped(loop)
    loop.scheduler.preempt_all()
    loop.scheduler.check_integrity()
    assert loop.state("running") == loop.state("swapped") == [] and len(loop.state("waiting")) == 3
    assert loop.scheduler.kv_cache_manager.num_free_blocks == 8
    loop.run()


def test_recomputation_after_a_second_preemption_is_counted():
    """A request that is preempted half-way through its recomputation had 65 tokens."""
    loop = Loop(max_num_batched_tokens=16, enable_prefix_caching=False)
    loop.add("a", distinct(0, 64), max_tokens=4)
    for _ in range(5):
        loop.step()
    loop.scheduler.preempt_all()
    assert loop.step() == {"a": 16}
    loop.scheduler.preempt_all()
    loop.run()
    assert loop.scheduler.stats().num_recomputed_tokens == 16 + 65


def test_a_request_swapped_while_it_was_recomputed_and_then_preempted_keeps_its_count():
    loop = Loop(max_num_batched_tokens=16, preemption_mode="swap", enable_prefix_caching=False)
    loop.add("a", distinct(0, 64), max_tokens=4)
    for _ in range(5):
        loop.step()
    loop.scheduler.preempt_all()
    loop.step()
    loop.scheduler.preempt(loop.scheduler.running.pop())
    assert loop.state("swapped") == ["a"]
    loop.scheduler.preempt_all()
    loop.run()
    assert loop.scheduler.stats().num_recomputed_tokens == 16 + 65


def test_a_copy_to_host_memory_for_a_finished_request_is_skipped():
    """Steps overlap: "b" is swapped out in a step that has no rows, so its copies are deferred to
    the next step. By then "b" has finished, and its host blocks may belong to another request.
    """
    loop = Loop(
        num_gpu_blocks_override=3,
        max_model_len=32,
        preemption_mode="swap",
        async_scheduling=True,
        enable_prefix_caching=False,
    )
    scheduler = loop.scheduler
    loop.add("a", distinct(0, 10), max_tokens=2)
    loop.add("b", distinct(1, 15), max_tokens=8)
    loop.step()
    last_of_a = scheduler.schedule()
    assert len(last_of_a.requests) == 2
    # no block is free for the 17th token of "b", and "a" has no more tokens to compute
    assert scheduler.schedule() is None and loop.state("swapped") == ["b"]
    scheduler.update_from_output(
        last_of_a, loop.executor.execute_model(last_of_a.output), loop.rows
    )
    assert [request.request_id for request in scheduler.abort_requests(["b"], 0)] == ["b"]
    loop.add("c", distinct(2, 10), max_tokens=1)
    step = scheduler.schedule()
    assert step.output.blocks_to_swap_out == []
    scheduler.check_integrity()


def test_a_preempted_request_keeps_its_place():
    loop = pressed(preemption_mode="recompute")
    loop.add("late", distinct(9, 20), max_tokens=4)
    order = []
    for _ in range(200):
        if not loop.scheduler.has_unfinished_requests():
            break
        loop.step()
        order += [new.request_id for new in loop.executor.steps[-1].new_requests]
    # both were preempted and came back in order of arrival
    assert order == ["0", "1", "2", "late", "2", "late"]


def test_a_batch_of_long_prompts_does_not_thrash():
    """Twelve prompts of half the cache each, in chunks: two run at a time, and almost nothing is
    computed twice.
    """
    cache = dict(
        num_gpu_blocks_override=33, enable_prefix_caching=False, preemption_mode="recompute"
    )
    loop = Loop(max_model_len=512, max_num_batched_tokens=32, max_num_seqs=12, **cache)
    for i in range(12):
        loop.add(str(i), distinct(i, 230), max_tokens=10)
    loop.run(5000)
    stats = loop.scheduler.stats()
    assert stats.num_prompt_tokens >= 12 * 230
    assert stats.num_recomputed_tokens <= 0.02 * stats.num_prompt_tokens, stats
