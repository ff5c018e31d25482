"""Blocks that the cache evicts and that come back: no output changes, and tenants are apart."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.engine_core import EngineCore
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams
from quire.tests.core.engine_loop import assert_nothing_left, collect, make_core, step
from quire.tests.core.test_random_workloads import (
    assert_as_expected,
    drive,
    make_tight_core,
    random_jobs,
)

MIB = 1 / 1024  # a block of the fake executor, in GiB


def ask(core: EngineCore, prompt: list[int], salt: str | None = None, name: str = "r"):
    params = SamplingParams(temperature=0.0, max_tokens=2, seed=0)
    core.add_request(EngineCoreRequest(name, prompt, params, cache_salt=salt))
    answers = {}
    while core.has_work():
        for outputs in step(core).values():
            collect(outputs, answers)
    return answers[name]


def conversation(number: int, num_tokens: int = 200) -> list[int]:
    return random.Random(number).choices(range(97), k=num_tokens)


def make_small_core(**arguments) -> EngineCore:
    return make_core(
        **{"num_gpu_blocks_override": 18, "kv_offloading_size": 100 * MIB, **arguments}
    )


def test_a_conversation_that_was_evicted_comes_back():
    core = make_small_core()
    first = ask(core, conversation(1))
    assert first.num_cached_tokens == 0
    for number in range(2, 5):
        ask(core, conversation(number))
    metrics = core.observer.get_metrics()
    assert metrics["num_blocks_offloaded"] >= 24 and metrics["num_blocks_reloaded"] == 0
    again = ask(core, conversation(1))
    assert again.tokens == first.tokens and again.num_cached_tokens == 12 * 16
    after = core.observer.get_metrics()
    assert after["num_blocks_reloaded"] == 12
    assert after["external_prefix_cache_hits"] == 12 * 16
    assert after["prefix_cache_hits"] == metrics["prefix_cache_hits"] == 0
    assert after["external_prefix_cache_queries"] - metrics["external_prefix_cache_queries"] == 200
    assert after["num_blocks_corrupt"] == 0
    assert_nothing_left(core)


def test_what_the_cache_has_is_not_loaded():
    core = make_small_core()
    ask(core, conversation(1))
    ask(core, conversation(2))  # takes the end of the first one
    answer = ask(core, conversation(1))
    reloaded = core.observer.get_metrics()["num_blocks_reloaded"]
    assert answer.num_cached_tokens == 12 * 16 and 0 < reloaded < 12
    assert core.observer.get_metrics()["prefix_cache_hits"] == (12 - reloaded) * 16


def test_tenants_are_apart():
    core = make_small_core()
    for number in (1, 2, 3):
        ask(core, conversation(number), "mine")
    for salt in (None, "yours"):
        assert ask(core, conversation(1), salt).num_cached_tokens == 0
    assert ask(core, conversation(1), "mine").num_cached_tokens == 12 * 16


def test_a_damaged_block_counts_as_absent():
    core = make_small_core()
    first = ask(core, conversation(1))
    for number in (2, 3):
        ask(core, conversation(number))
    core.executor.offload.loss = 1.0
    assert ask(core, conversation(1)).tokens == first.tokens
    assert core.observer.get_metrics()["num_blocks_corrupt"] == 1
    assert core.observer.get_metrics()["num_blocks_reloaded"] == 0
    assert_nothing_left(core)


def test_a_reset_forgets_all_and_a_sleep_keeps_all():
    core = make_small_core()
    ask(core, conversation(1))
    core.call_utility("sleep", [1])
    core.call_utility("wake_up", [])
    assert ask(core, conversation(1)).num_cached_tokens == 12 * 16
    assert core.observer.get_metrics()["num_blocks_reloaded"] == 12
    assert core.call_utility("reset_prefix_cache", [])
    assert not core.executor.offload.kept
    assert ask(core, conversation(1)).num_cached_tokens == 0
    core.call_utility("load_weights", ["/other"])
    assert ask(core, conversation(1)).num_cached_tokens == 0


def test_a_failed_request_leaves_nothing():
    core = make_small_core()
    core.executor.errors["bad", 1] = "it failed"
    ask(core, conversation(1), name="bad")
    for number in (2, 3, 4):
        ask(core, conversation(number))
    assert ask(core, conversation(1)).num_cached_tokens == 0


def test_nothing_is_stored_without_the_option():
    core = make_core(num_gpu_blocks_override=18)
    assert core.executor.offload is None and core.scheduler.kv_cache_manager.offload is None


SETTINGS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([16, 64, 2048]),
        "spare_blocks": st.sampled_from([0, 7, 23, 983]),
        "max_num_seqs": st.sampled_from([1, 3, 8, 64]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "preemption_mode": st.sampled_from(["auto", "recompute", "swap"]),
        "swap_space": st.sampled_from([4.0, 0.02]),
        "num_scheduler_steps": st.sampled_from([0, 0, 1, 7]),
        "burst_weights_bytes": st.sampled_from([0, 2 * 10**7]),
        "enable_chunked_prefill": st.just(True),
        "kv_offloading_size": st.sampled_from([1 * MIB, 20 * MIB, 1000 * MIB]),
        "windows": st.sampled_from([(0,), (0,), (40,), (0, 40), (0, 0, 1, 17, 17, 100)]),
        "pipeline_parallel_size": st.sampled_from([1, 1, 3]),
        "async_scheduling": st.booleans(),
    }
)


WORKLOADS = given(
    seed=st.integers(0, 2**32),
    num_jobs=st.integers(1, 30),
    arguments=SETTINGS,
    loss=st.sampled_from([0.0, 0.0, 0.1]),
)


@settings(max_examples=5, deadline=None, derandomize=True)
@WORKLOADS
def test_no_output_changes(**workload):
    assert_no_output_changes(**workload)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, derandomize=True)
@WORKLOADS
def test_no_output_changes_in_more_workloads(**workload):
    assert_no_output_changes(**workload)


def assert_no_output_changes(
    seed: int, num_jobs: int, arguments: dict[str, Any], loss: float
) -> None:
    core, jobs = make_tight_core(**arguments), random_jobs(seed, num_jobs)
    core.executor.offload.loss = loss
    for _ in range(2):
        assert_as_expected(core, jobs, drive(core, jobs))
        assert_nothing_left(core)
    metrics = core.observer.get_metrics()
    assert metrics["num_blocks_corrupt"] == core.executor.offload.num_corrupt


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize("seed", range(3))
def test_a_small_cache_with_a_place_finds_what_a_large_one_finds(seed):
    jobs = random_jobs(seed, 60)
    found = []
    for arguments in (
        {"num_gpu_blocks_override": 2000},
        {"num_gpu_blocks_override": 40, "kv_offloading_size": 1.0},
    ):
        core = make_core(**arguments)
        for _ in range(2):
            drive(core, jobs, aborts=False)
        metrics = core.observer.get_metrics()
        found.append(metrics["prefix_cache_hits"] + metrics["external_prefix_cache_hits"])
        if len(found) == 2:
            assert metrics["num_blocks_reloaded"] > 100
    assert found[1] > 0.9 * found[0]
