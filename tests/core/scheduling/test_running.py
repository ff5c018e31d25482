"""Running requests: their tokens under the budget, which one is preempted, and their order."""

import pytest
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams
from quire.tests.core.engine_loop import assert_nothing_left, make_core, step
from quire.tests.core.scheduling.loop import Loop, distinct
from quire.tests.fakes import expected_output


def test_the_latest_is_preempted_and_goes_to_the_front_of_the_queue():
    loop = Loop(
        num_gpu_blocks_override=5, max_model_len=64, max_num_seqs=2, enable_prefix_caching=False
    )
    loop.add("old", distinct(0, 31), max_tokens=20)
    loop.add("new", distinct(1, 31), max_tokens=20)
    loop.add("last", distinct(2, 5), max_tokens=20)
    loop.step()
    loop.step()  # both fill their second block and none is left
    assert loop.step() == {"old": 1}
    assert (loop.state("running"), loop.state("waiting")) == (["old"], ["new", "last"])
    assert loop.executor.steps[-1].freed_slots == [1]
    assert loop.scheduler.stats().num_preemptions == 1
    loop.run()
    assert [len(loop.tokens[name]) for name in ("old", "new", "last")] == [20, 20, 20]
    # later "last", with 16 tokens computed, is preempted for "new" in the same way
    stats = loop.scheduler.stats()
    assert (stats.num_preemptions, stats.num_recomputed_tokens) == (2, 32 + 16)


def test_preempting_all_at_any_step_does_not_change_outputs():
    loop = Loop(max_num_batched_tokens=64)
    for i in range(5):
        loop.add(str(i), distinct(i, 40), max_tokens=6)
    for num_steps in range(40):
        if num_steps % 3 == 0:
            loop.scheduler.preempt_all()
            assert loop.state("running") == [] and loop.scheduler.kv_cache_manager.usage == 0.0
            loop.scheduler.check_integrity()
            assert loop.scheduler.reset_prefix_cache()
        loop.step()
    loop.run()
    for i in range(5):
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=6)
        assert loop.tokens[str(i)] == expected_output(distinct(i, 40), params, [], loop.config)[0]
    assert loop.scheduler.counters.num_preemptions > 5


def test_a_preempted_request_finds_its_own_blocks_in_the_cache():
    loop = Loop(num_gpu_blocks_override=7, max_model_len=96, max_num_seqs=2)
    loop.add("old", distinct(0, 47), max_tokens=4)
    loop.add("new", distinct(1, 47), max_tokens=4)
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.num_preemptions == 1
    assert stats.num_recomputed_tokens == 16  # 48 were computed; "old" took one of the three blocks
    # its own blocks are not counted as hits
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (94, 0)
    assert loop.cached == {"old": 0, "new": 0}


def test_priority_admits_and_preempts_by_priority_then_arrival():
    loop = Loop(
        scheduling_policy="priority",
        num_gpu_blocks_override=5,
        max_model_len=64,
        max_num_seqs=2,
        enable_prefix_caching=False,
    )
    loop.add("late but urgent", distinct(0, 31), priority=-1, max_tokens=4)
    loop.add("early", distinct(1, 31), priority=5, max_tokens=4)
    loop.add("middle", distinct(2, 31), priority=2, max_tokens=4)
    assert list(loop.step()) == ["late but urgent", "middle"]
    loop.step()
    assert loop.step() == {"late but urgent": 1}
    assert loop.state("waiting") == ["middle", "early"]
    loop.run()
    assert list(loop.ends) == ["late but urgent", "middle", "early"]


def test_a_higher_priority_takes_memory_but_no_slot():
    loop = Loop(
        scheduling_policy="priority",
        num_gpu_blocks_override=5,
        max_model_len=64,
        max_num_seqs=2,
        enable_prefix_caching=False,
    )
    loop.add("a", distinct(0, 31), priority=3, max_tokens=30)
    loop.add("b", distinct(1, 15), priority=3, max_tokens=30)
    loop.step()
    loop.add("urgent", distinct(2, 16), priority=0, max_tokens=30)
    loop.step()
    assert loop.state("running") == ["a", "b"]  # both slots are in use and stay so
    loop.scheduler.abort_requests(["b"], 0)
    loop.step()
    assert loop.state("running") == ["urgent", "a"]
    while "a" in loop.state("running"):
        loop.step()
    assert loop.state("running") == ["urgent"]  # "a" was preempted although it arrived earlier
    loop.run()


def test_fcfs_ignores_priority():
    loop = Loop(max_num_seqs=1)
    loop.add("first", [1], priority=9)
    loop.add("second", [2], priority=-9)
    loop.run()
    assert list(loop.ends) == ["first", "second"]


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("budget", [16, 2048])
def test_many_requests_that_do_not_fit_still_finish(policy, budget):
    loop = Loop(
        scheduling_policy=policy,
        num_gpu_blocks_override=9,
        max_model_len=128,
        max_num_batched_tokens=budget,
    )
    for i in range(12):
        loop.add(str(i), distinct(i, 40 + 5 * i), max_tokens=30, priority=-i % 3)
    loop.run()
    assert [len(tokens) for tokens in loop.tokens.values()] == [30] * 12 and len(loop.ends) == 12
    assert loop.scheduler.stats().num_preemptions > 0


def test_running_requests_come_before_waiting_ones():
    loop = Loop(max_num_batched_tokens=16)
    loop.add("a", distinct(0, 40))
    assert loop.step() == {"a": 16}
    loop.add("b", distinct(1, 3))
    assert [loop.step() for _ in range(3)] == [{"a": 16}, {"a": 8, "b": 3}, {"a": 1, "b": 1}]


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_long_request_holds_a_window_and_a_step(overlapped):
    """The blocks of a group with a window do not grow with the context."""
    core = make_core(
        windows=(0, 40),
        max_model_len=2048,
        max_num_batched_tokens=64,
        async_scheduling=overlapped,
        num_scheduler_steps=1,
        num_gpu_blocks_override=400,
    )
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=400)
    core.add_request(EngineCoreRequest("a", distinct(0, 1000), params))
    manager, most = core.scheduler.kv_cache_manager, 0
    while core.has_work():
        step(core)
        if (request := core.scheduler.requests.get("a")) is not None:
            of_window = manager.num_blocks_of("a") - -(-request.num_computed_tokens // 16)
            most = max(most, of_window)
    assert most == (11 if overlapped else 7)  # of 39 + 64 or 39 + 128 tokens; 1,400 take 88
    assert_nothing_left(core)
