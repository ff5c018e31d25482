"""Observation of the engine: reported steps, requests and blocks agree with the engine's state
after any workload.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import pytest
from quire.core import engine_core, observation, output_rows
from quire.core.engine_core import EngineCore
from quire.core.kv_cache.block_pool import BlockPool
from quire.core.observation import MAX_STEPS, map_blocks
from quire.ipc.errors import InvalidParameterError
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.tests.core.engine_loop import make_core, run, step
from quire.tests.core.test_random_workloads import random_jobs

FORMS = [
    {},
    {"async_scheduling": True},
    {"num_scheduler_steps": 4},
    {"num_scheduler_steps": 4, "async_scheduling": True},
]


def make_request(request_id="r", max_tokens=4, prompt=range(40), **fields) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id,
        list(prompt),
        SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens),
        **fields,
    )


def check(core: EngineCore) -> None:
    """Check the invariants of every observation, between any two steps."""
    seen, state, pool = (
        core.observer.observe(-1, 4096),
        core.observer.scheduler_state(),
        core.scheduler.kv_cache_manager.block_pool,
    )
    letters, counts = Counter(seen["blocks"]), seen["block_counts"]
    assert seen["num_blocks"] == core.ready.num_blocks
    assert letters.total() == len(pool.blocks) <= seen["num_blocks"]
    assert seen["blocks"][0] == "-" and letters["-"] == 1
    assert sum(counts.values()) == seen["num_blocks"] - 1
    assert letters["c"] == counts["cached"]
    assert (letters["u"], letters["s"]) == (counts["used"], counts["shared"])
    assert counts["free"] + counts["cached"] == state["num_free_blocks"]
    assert letters["u"] + letters["s"] == pool.num_used_blocks
    assert letters["c"] == sum(
        block.ref_cnt == 0 for block in pool.blocks if block.block_hash is not None
    )
    tables = Counter(
        i
        for request_id in state["running"]
        for i in core.scheduler.kv_cache_manager.get_block_ids(request_id)
    )
    assert {i for i, letter in enumerate(seen["blocks"]) if letter == "s"} == {
        i for i, count in tables.items() if count > 1
    }
    assert sum(row["num_blocks"] for row in seen["requests"]) == tables.total()
    by_state = {
        name: [row["request_id"] for row in seen["requests"] if row["state"] == name]
        for name in ("running", "waiting", "swapped", "held", "grammar")
    }
    assert (
        by_state["running"] == state["running"]
        if core.config.scheduler_config.scheduling_policy == "fcfs"
        else True
    )
    assert {name: sorted(ids) for name, ids in by_state.items()} == {
        name: sorted(state[name if name != "grammar" else "waiting_for_grammar"])
        for name in by_state
    }
    assert seen["counters"] == core.observer.get_metrics()


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_gpu_blocks_override": 17, "max_num_seqs": 16},
        {
            "num_gpu_blocks_override": 17,
            "max_num_seqs": 16,
            "preemption_mode": "swap",
            "async_scheduling": True,
        },
        {"max_num_batched_tokens": 16, "num_scheduler_steps": 4, "scheduling_policy": "priority"},
        {"num_gpu_blocks_override": 1000, "max_num_seqs": 64},
    ],
    ids=str,
)
def test_it_agrees_with_the_engine_after_every_step(arguments):
    core, jobs = make_core(**arguments), random_jobs(seed=11, num_jobs=40)
    answered, shared = 0, 0
    for step_index in range(5000):
        for job in jobs:
            if job.arrives_at_step == step_index:
                core.add_request(job.request)
            if job.abort_at_step == step_index:
                core.abort_requests([job.request.request_id])
        for outputs in step(core).values():
            answered += len(outputs.finished)
        check(core)
        shared += "s" in core.observer.observe()["blocks"]
        if step_index > 60 and not core.has_work():
            break
    steps = core.observer.observe()["steps"]
    counters = core.observer.observe()["counters"]
    assert answered >= len(jobs) and shared
    if len(steps) < MAX_STEPS:  # otherwise the first steps would have been dropped
        assert sum(record[6] for record in steps) == counters["num_generation_tokens"]
        assert sum(record[8] for record in steps) == counters["num_preemptions"]
        assert sum(record[5] for record in steps) >= counters["num_prompt_tokens"]


@pytest.mark.parametrize("arguments", FORMS, ids=str)
def test_steps_are_in_order_and_reported_once(arguments):
    core = make_core(max_num_batched_tokens=16, **arguments)
    assert (core.observer.observe()["step"], core.observer.observe()["steps"]) == (-1, [])
    core.add_request(make_request(max_tokens=9))
    run(core)
    seen = core.observer.observe()
    steps = seen["steps"]
    assert [record[0] for record in steps] == list(range(len(steps))) and seen["step"] == len(
        steps
    ) - 1
    # Three chunks of the prompt, the last of which samples. Then one token per step, or as many as
    # the lookahead decodes.
    assert [record[5] for record in steps] == [16, 16, 8] + [0] * (len(steps) - 3)
    assert [record[6] for record in steps][:2] == [0, 0] and sum(record[6] for record in steps) == 9
    assert all(record[7] == 1 and record[8] == 0 for record in steps)
    tokens = core.observer.status()["step_tokens"]
    assert tokens["sum"] == 40 + 9 and sum(tokens["counts"]) == len(steps)
    assert tokens["counts"][tokens["bounds"].index(16)] >= 2  # the chunks of 16
    assert [record[1] for record in steps] == sorted(record[1] for record in steps) and seen[
        "time"
    ] >= steps[-1][1]
    assert (
        core.observer.observe(len(steps) - 3)["steps"] == steps[-2:]
        and core.observer.observe(len(steps) - 1)["steps"] == []
    )


def test_the_bound_of_the_next_step():
    core = make_core()
    assert core.records.expected_s(100) == 0.0
    core.executor.delay_s = 0.01
    core.add_request(make_request(max_tokens=3))
    run(core)
    execute_s = core.observer.observe()["steps"][-1][3]
    assert execute_s >= 0.01 and core.records.expected_s(7) == 7 * execute_s


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_timings_of_a_step(monkeypatch):
    """The clock advances by 1 in scheduling, by 10 in the model and by 100 in processing."""
    core, clock = make_core(), Clock()
    for module in (observation, engine_core, output_rows):
        monkeypatch.setattr(module, "time", clock)

    def taking(seconds: float, method):
        def call(*arguments):
            result = method(*arguments)
            clock.now += seconds
            return result

        return call

    core.scheduler.schedule = taking(1, core.scheduler.schedule)
    core.executor.execute_model = taking(10, core.executor.execute_model)
    core.scheduler.update_from_output = taking(100, core.scheduler.update_from_output)
    core.add_request(make_request(max_tokens=2))
    run(core)
    assert [record[1:5] for record in core.observer.observe()["steps"]] == [
        [0.0, 1.0, 10.0, 100.0],
        [111.0, 1.0, 10.0, 100.0],
    ]


def test_overlapped_steps_execute_one_after_the_other(monkeypatch):
    """Step n + 1 is submitted while step n runs, so its execution is counted from the end of n. The
    model takes 10, everything else 1.
    """
    core, clock = make_core(async_scheduling=True), Clock()
    for module in (observation, engine_core, output_rows):
        monkeypatch.setattr(module, "time", clock)
    ends, schedule, update = [0.0], core.scheduler.schedule, core.scheduler.update_from_output

    class Running(Future):
        def result(self):
            clock.now = max(clock.now, self.end)
            return super().result()

    def submit_model(output):
        running = Running()
        running.end = max(ends[-1], clock.now) + 10
        ends.append(running.end)
        running.set_result(core.executor.execute_model(output))
        return running

    def slow_schedule():
        clock.now += 1
        return schedule()

    def slow_update(*arguments):
        update(*arguments)
        clock.now += 1

    core.executor.submit_model, core.scheduler.schedule, core.scheduler.update_from_output = (
        submit_model,
        slow_schedule,
        slow_update,
    )
    core.add_request(make_request(max_tokens=4))
    run(core)
    steps = core.observer.observe()["steps"]
    assert [record[2:5] for record in steps[:4]] == [[1.0, 10.0, 1.0]] * 4
    assert [record[1] for record in steps[:4]] == [0.0, 1.0, 12.0, 22.0]


def test_the_ring_is_bounded():
    core = make_core(max_model_len=1024)
    core.add_request(make_request(max_tokens=MAX_STEPS + 50))
    run(core)
    steps = core.observer.observe()["steps"]
    assert len(steps) == MAX_STEPS and steps[-1][0] == MAX_STEPS + 49


def test_requests_in_every_state():
    core = make_core(max_num_seqs=1)
    check_ = core.executor.grammar_checks["slow"] = Future()
    core.add_request(make_request("first", max_tokens=50, priority=3))
    core.add_request(make_request("second"))
    params = SamplingParams(
        temperature=0.0,
        seed=0,
        max_tokens=7,
        structured_outputs=StructuredOutputsParams(regex="slow"),
    )
    core.add_request(EngineCoreRequest("third", [1, 2], params, eos_token_ids=[96]))
    step(core)
    step(core)
    core.pausing.pause("keep")
    core.add_request(make_request("fourth"))
    rows = {row.pop("request_id"): row for row in core.observer.observe()["requests"]}
    assert {request_id: row["state"] for request_id, row in rows.items()} == {
        "first": "running",
        "second": "waiting",
        "third": "grammar",
        "fourth": "held",
    }
    assert rows["first"].pop("queued_time") > 0 and rows["third"].pop("queued_time") > 0
    assert rows["first"] == {
        "state": "running",
        "num_prompt_tokens": 40,
        "num_computed_tokens": 41,
        "num_output_tokens": 2,
        "max_tokens": 50,
        "num_blocks": 3,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "priority": 0,
        "lora_name": None,
    }
    assert rows["first"].keys() == rows["third"].keys() and rows["third"]["max_tokens"] == 7
    check_.set_result(None)
    core.pausing.resume()
    while core.has_work():
        step(core)
    assert core.observer.observe()["requests"] == []


def test_a_map_is_as_large_as_the_blocks_in_use():
    """In a large cache with few blocks in use, each of them is one letter."""
    pool = BlockPool(65_000)
    assert map_blocks(pool, 100)["blocks"] == "-"
    pool.free_blocks(pool.get_new_blocks(99)[50:])
    seen = map_blocks(pool, 100)
    assert (seen["blocks"], seen["blocks_per_cell"]) == ("-" + "u" * 50 + "." * 49, 1)
    assert seen["block_counts"] == {"free": 64_949, "cached": 0, "used": 50, "shared": 0}


def test_a_map_with_several_blocks_to_a_cell():
    pool = BlockPool(11)
    pool.get_new_blocks(10)
    blocks = pool.blocks
    for block in blocks[4:9]:
        pool.cache(block, bytes([block.block_id]))
    pool.touch(blocks[2:3])
    pool.free_blocks(reversed(blocks[4:]))
    maps = {max_cells: map_blocks(pool, max_cells) for max_cells in (11, 10, 6, 5, 3, 2, 1)}
    counts = [seen["block_counts"] for seen in maps.values()]
    assert counts == [{"free": 2, "cached": 5, "used": 2, "shared": 1}] * len(maps)
    received = {
        max_cells: (seen["blocks"], seen["blocks_per_cell"]) for max_cells, seen in maps.items()
    }
    assert received == {
        11: ("-usuccccc..", 1),
        10: ("usccc.", 2),
        6: ("usccc.", 2),
        5: ("suc.", 3),
        3: ("scc", 4),
        2: ("sc", 6),
        1: ("s", 11),
    }


@pytest.mark.parametrize(
    ("args", "parameter"),
    [
        (["1"], "since_step"),
        ([-2], "since_step"),
        ([1.5], "since_step"),
        ([True], "since_step"),
        ([None], "since_step"),
        ([0, 0], "max_blocks"),
        ([0, -1], "max_blocks"),
        ([0, 2**16 + 1], "max_blocks"),
        ([0, "all"], "max_blocks"),
        ([0, 1, 2], "args"),
    ],
)
def test_bad_arguments_are_refused(args, parameter):
    with pytest.raises(InvalidParameterError) as caught:
        make_core().call_utility("observe", args)
    assert caught.value.parameter == parameter
