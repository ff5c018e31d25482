"""What a trace says of the scheduler's decisions, and that a trace changes none of them."""

import pytest
from quire.ipc.errors import InvalidParameterError
from quire.ipc.trace import MAX_STEPS, EngineTrace
from quire.tests.core.engine_loop import greedy, make_core, make_request, run, step


def traced(core, num_steps: int = MAX_STEPS) -> EngineTrace:
    core.call_utility("start_trace", [num_steps])
    run(core)
    return core.call_utility("end_trace", [])


def test_rows_blocks_and_ends_of_a_request():
    core = make_core(block_size=16)
    core.add_request(make_request("a", prompt=[1] * 20, params=greedy(max_tokens=14)))
    trace = traced(core)
    first, *others = trace.steps
    [row] = first.rows
    assert (row.request_id, row.num_tokens, row.num_computed_tokens) == ("a", 20, 0)
    assert row.is_new and row.num_blocks == 2 and row.num_cached_tokens == 0
    before, after, end = first.num_free_blocks
    assert (before - after, end - after) == (2, 0)
    assert [step.rows[0].num_tokens for step in others] == [1] * 13
    # 33 tokens: the 33rd needs a third block
    assert [step.rows[0].num_blocks for step in others].count(1) == 1
    assert [step.finished for step in trace.steps] == [[]] * 13 + [["a"]]
    last = trace.steps[-1].num_free_blocks
    assert last[2] - last[1] == 3
    assert trace.implementation == "fake" and trace.pid > 0
    assert [step.num_tokens for step in trace.steps] == [1] * 14


def test_tokens_of_the_prefix_cache():
    core = make_core(block_size=16)
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=[1] * 40, params=greedy(max_tokens=1)))
        trace = traced(core)
    [row] = trace.steps[0].rows
    assert row.num_cached_tokens == row.num_computed_tokens == 32


def test_why_a_request_waits_for_the_budget():
    core = make_core(max_num_batched_tokens=32)
    for name in ("a", "b", "c"):
        core.add_request(make_request(name, prompt=[1] * 40, params=greedy(max_tokens=1)))
    first = traced(core).steps[0]
    assert first.budget == 32 and [row.request_id for row in first.rows] == ["a"]
    assert [(one.request_id, one.reason) for one in first.waiting] == [
        ("b", "budget"),
        ("c", "order"),
    ]


def test_why_a_request_waits_for_slots_and_blocks():
    core = make_core(max_num_seqs=1)
    for name in ("a", "b"):
        core.add_request(make_request(name, params=greedy(max_tokens=2)))
    assert [one.reason for one in traced(core).steps[0].waiting] == ["slots"]
    core = make_core(block_size=16, num_gpu_blocks_override=18, enable_prefix_caching=False)
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=[1] * 200, params=greedy(max_tokens=2)))
    assert [one.reason for one in traced(core).steps[0].waiting] == ["blocks"]


def test_a_sibling_waits_for_its_prompt():
    core = make_core()
    params = greedy(max_tokens=2, n=2, temperature=1.0)
    core.add_request(make_request("a", prompt=[1] * 40, params=params))
    [waiting] = traced(core).steps[0].waiting
    assert waiting.reason == "sibling"


def test_a_preemption_is_named():
    core = make_core(block_size=16, num_gpu_blocks_override=20, enable_prefix_caching=False)
    for name in ("a", "b"):
        core.add_request(make_request(name, prompt=[1] * 120, params=greedy(max_tokens=60)))
    trace = traced(core)
    preempting = [step for step in trace.steps if step.preempted]
    assert preempting and preempting[0].preempted == ["b"]
    assert preempting[0].waiting[0].reason == "preemption"


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_trace_changes_nothing(overlapped):
    answers = []
    for is_traced in (False, True):
        core = make_core(async_scheduling=overlapped, max_num_batched_tokens=32)
        for i in range(4):
            core.add_request(make_request(f"r{i}", prompt=[i + 1] * 30))
        if is_traced:
            core.call_utility("start_trace", [5])
        answers.append(run(core))
    assert answers[0] == answers[1]
    assert [one.step for one in core.call_utility("end_trace", []).steps] == [0, 1, 2, 3, 4]


def test_one_trace_at_a_time_and_only_its_client_ends_it():
    core = make_core()
    with pytest.raises(InvalidParameterError, match="trace: is not being recorded"):
        core.call_utility("end_trace", [])
    with pytest.raises(InvalidParameterError, match="trace: is not being recorded"):
        core.call_utility("wait_for_trace", [])
    core.call_utility("start_trace", [2], 1)
    with pytest.raises(InvalidParameterError, match="trace: is being recorded already"):
        core.call_utility("start_trace", [2], 0)
    with pytest.raises(InvalidParameterError, match="trace: is not being recorded"):
        core.call_utility("end_trace", [], 0)
    core.drop_client(1)
    core.call_utility("start_trace", [2], 0)


@pytest.mark.parametrize("steps", [0, MAX_STEPS + 1, "3", None, True])
def test_the_number_of_steps_is_checked(steps):
    with pytest.raises(InvalidParameterError, match=f"steps: must be between 1 and {MAX_STEPS}"):
        make_core().call_utility("start_trace", [steps])


def test_waiting_for_a_trace():
    core = make_core()
    core.call_utility("start_trace", [2])
    done = core.call_utility("wait_for_trace", [])
    core.add_request(make_request("a", params=greedy(max_tokens=4)))
    step(core)
    assert not done.done()
    step(core)
    assert done.result(0) == 2
    core.call_utility("end_trace", [])
    core.call_utility("start_trace", [2])
    done = core.call_utility("wait_for_trace", [])
    assert core.call_utility("end_trace", []).steps == [] and done.result(0) == 0
