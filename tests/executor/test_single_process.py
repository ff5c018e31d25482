"""The executor's interface as the engine core uses it."""

from __future__ import annotations

import pytest
from quire.executor.worker import Worker
from quire.ipc.errors import InvalidParameterError
from quire.tests.executor.driver import generate, make_config, start_executor


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_more_than_one_rank_is_refused(tiny, name):
    with pytest.raises(
        InvalidParameterError,
        match=f"{name}: must be 1 for an executor with one rank, got 2",
    ):
        Worker(make_config(tiny(), **{name: 2}))


def test_the_life_of_an_executor(tiny):
    executor = Worker(make_config(tiny("llama"), max_num_seqs=2, max_model_len=64))
    with pytest.raises(RuntimeError, match="has no model"):
        executor.check_health()
    stages = set()
    executor.load_model(lambda stage, fraction: stages.add(stage))
    assert stages == {"load weights"}
    num_blocks = executor.determine_num_blocks()
    assert executor.initialize_kv_cache(num_blocks) == num_blocks * executor.block_bytes
    executor.check_health()
    executor.execute_dummy_batch()
    (row,) = generate(executor, [[1, 2, 3]], 5)
    assert len(row.output) == 5
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="has no model"):
        executor.check_health()


def test_collective_rpc_asks_every_rank(tiny):
    executor = start_executor(tiny())
    [usage] = executor.collective_rpc("memory_usage")
    assert (
        usage["kv_cache_bytes"] > 0
        and usage["weights_bytes"] > 0
        and usage["resident_bytes"] > usage["weights_bytes"]
    )
    assert executor.collective_rpc("execute_dummy_batch") == [None]


@pytest.mark.parametrize(
    "method", ["no_such_method", "shutdown", "execute_model", "__init__", "model"]
)
def test_only_listed_worker_methods_can_be_called(tiny, method):
    with pytest.raises(
        InvalidParameterError, match="method: must be one of check_health, .*, wake_up, got"
    ):
        start_executor(tiny()).collective_rpc(method)


def test_arguments_must_match(tiny):
    with pytest.raises(InvalidParameterError, match=r"args: check_health does not take \[1\]"):
        start_executor(tiny()).collective_rpc("check_health", 1)


def test_two_executors_live_side_by_side(tiny):
    a, b = start_executor(tiny("qwen2")), start_executor(tiny("qwen3"))
    alone = [generate(executor, [[5, 6, 7]], 6)[0].output for executor in (a, b)]
    assert [generate(executor, [[5, 6, 7]], 6)[0].output for executor in (b, a)] == alone[::-1]
