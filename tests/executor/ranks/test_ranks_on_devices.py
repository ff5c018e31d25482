"""Ranks as on GPUs, without one: tensors go through torch.distributed between processes of one
machine, and each rank keeps its state on its device.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from quire.executor.ranks.local_ranks import LocalRanks
from quire.executor.ranks.multiproc_executor import MultiprocExecutor
from quire.ipc.params import SamplingParams
from quire.tests.executor.driver import generate, make_config, start_executor
from quire.tests.executor.on_device import LateCopies, keep_on_device, use_forward
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.executor.ranks.test_steps_in_flight import check_equal, jobs_of, run_jobs


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 3), (2, 2)])
def test_state_on_the_device(tiny, monkeypatch, size: int, num_stages: int) -> None:
    """With steps in flight and few blocks; operation by operation, as on a GPU."""
    model = tiny("qwen2", num_hidden_layers=4)
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 6}
    one = start_executor(model, **options)
    with monkeypatch.context() as patch:
        keep_on_device(patch, LateCopies())
        ranks = RankThreads.of(model, size, num_stages, num_gpu_blocks_override=20, **options)
    for rank in ranks.ranks:
        use_forward(rank, None)
        assert rank.state.tables is not None
    jobs = jobs_of(10 * num_stages + size, 10)
    wanted, _ = run_jobs(one, one.config, jobs)
    answers, core = run_jobs(ranks, ranks.config, jobs)
    check_equal(wanted, answers)
    assert core.observer.get_metrics()["num_preemptions"] > 0
    ranks.shutdown()


@pytest.mark.slow
def test_processes_that_share_no_memory(tiny) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    config = make_config(tiny("qwen2"), **sizes)
    start = partial(LocalRanks, shares_memory=False)
    executor = MultiprocExecutor(config, start)
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    prompts, params = [[1, 2, 3], [7] * 40, [5, 6]], SamplingParams(temperature=0.9, seed=3)
    found = [row.output for row in generate(executor, prompts, 20, params)]
    one = start_executor(tiny("qwen2"))
    assert found == [row.output for row in generate(one, prompts, 20, params)]
    assert isinstance(executor.ranks, LocalRanks)
    os.kill(executor.ranks.processes[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"rank 1 of 4 .* SIGKILL"):
        generate(executor, prompts, 20, params)
    executor.shutdown()
