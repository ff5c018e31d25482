"""Blocks copied to host memory come back unchanged, whatever replaced them. Also block copies and
measured costs.
"""

import math

import pytest
import torch
from quire.executor import preemption_costs
from quire.executor.preemption_costs import shortest_time
from quire.ipc.models.memory_plan import plan_num_host_blocks
from quire.ipc.step_messages import SchedulerOutput
from quire.tests.executor.driver import make_config, start_executor


@pytest.fixture
def executor(tiny):
    made = start_executor(tiny(), num_gpu_blocks_override=20)
    made.num_host_blocks, made.costs = made.initialize_swap_space()
    for layer in made.model.attention_layers():
        for cache in (layer.key_cache, layer.value_cache):
            cache.copy_(torch.randn(cache.shape))
    yield made
    made.shutdown()


def caches(executor) -> list[torch.Tensor]:
    return [
        cache
        for layer in executor.model.attention_layers()
        for cache in (layer.key_cache, layer.value_cache)
    ]


def move(executor, **columns) -> None:
    executor.execute_model(SchedulerOutput(0, [], [], [], [], **columns))


def test_swap_out_and_in(executor):
    before = [cache.clone() for cache in caches(executor)]
    move(executor, blocks_to_swap_out=[(3, 0), (7, 5)])
    for cache in caches(executor):
        cache[[3, 7]] = float("nan")
    move(executor, blocks_to_swap_in=[(5, 7), (0, 12)])
    for cache, old in zip(caches(executor), before):
        assert torch.equal(cache[7], old[7]) and torch.equal(cache[12], old[3])
        untouched = [i for i in range(20) if i not in (3, 7, 12)]
        assert torch.equal(cache[untouched], old[untouched])


def test_swap_out_runs_before_swap_in_and_copies_run_last(executor):
    before = [cache.clone() for cache in caches(executor)]
    move(executor, blocks_to_swap_out=[(4, 1)])
    move(
        executor,
        blocks_to_swap_out=[(9, 2)],
        blocks_to_swap_in=[(1, 9)],
        blocks_to_copy=[(9, 10), (11, 13)],
    )
    for cache, old in zip(caches(executor), before):
        assert (
            torch.equal(cache[9], old[4])
            and torch.equal(cache[10], old[4])
            and torch.equal(cache[13], old[11])
        )
    move(executor, blocks_to_swap_in=[(2, 1)])
    for cache, old in zip(caches(executor), before):
        assert torch.equal(cache[1], old[9])


def test_costs_are_measured(executor):
    costs = executor.costs
    assert (
        executor.num_host_blocks > 0
        and costs.recompute_s_per_token > 0
        and costs.swap_s >= 0
        and costs.swap_s_per_token >= 0
    )
    assert costs.swap_s + costs.swap_s_per_token > 0


@pytest.mark.parametrize("arguments", [{"swap_space": 0.0}, {"preemption_mode": "recompute"}])
def test_without_swapping_no_memory_is_allocated_and_copies_work(tiny, arguments):
    executor = start_executor(tiny(), num_gpu_blocks_override=20, **arguments)
    assert executor.initialize_swap_space()[0] == 0
    caches(executor)[0][2] = 7.0
    move(executor, blocks_to_copy=[(2, 3)])
    assert (caches(executor)[0][3] == 7.0).all()
    executor.shutdown()


def test_the_swap_space_is_limited_to_what_is_useful(tiny):
    config = make_config(tiny(), swap_space=1.0, max_model_len=100, max_num_seqs=4)
    assert plan_num_host_blocks(config, 2**20, 2**40) == 4 * 7  # all requests need no more
    assert plan_num_host_blocks(config, 2**27, 2**40) == 8
    assert plan_num_host_blocks(config, 2**27, 2**30) == 2  # a quarter of the free memory


@pytest.mark.parametrize(
    ("durations", "budget_s", "shortest", "num_runs"),
    [
        ([9, 3, 1, 2], math.inf, 1, 4),  # the first run sets things up
        ([9, 3, 1, 2], 5, 9, 1),  # but at most the total if a run takes this long
        ([2, 3, 1, 2], 4, 3, 2),
        ([1, 3, 4, 2], 5, 3, 3),
    ],
)
def test_the_shortest_time_stays_within_its_budget(
    monkeypatch, durations, budget_s, shortest, num_runs
):
    now = 0.0
    runs = iter(durations)

    def run() -> None:
        nonlocal now
        now += next(runs)

    monkeypatch.setattr(preemption_costs.time, "perf_counter", lambda: now)
    assert shortest_time(run, 3, budget_s) == shortest
    assert list(runs) == durations[num_runs:]
