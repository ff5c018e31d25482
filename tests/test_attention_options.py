"""Models with sliding windows, and caches of other types, give the same outputs whatever the scheduler does with a request.
May know: the public API, the bundled model.
Must not know: how attention is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from quire.tests.client_forms import make_engine
from quire.tests.workloads import assert_same, drive, random_jobs

JOBS = [replace(job, arrives_at_step=job.arrives_at_step // 8) for job in random_jobs(30, vocab_size=1500, seed=2)]  # they crowd
REFERENCE = {"reshape_and_cache": "reference", "paged_attention": "reference"}  # slow: fewer jobs
OPTIONS = [
    pytest.param(JOBS, {"hf_overrides": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}}, id="window"),
    pytest.param(JOBS[:8], {"kv_cache_dtype": "fp8", "kernels": REFERENCE}, id="fp8"),
]
FEW = {"block_size": 8, "num_gpu_blocks_override": 50}
SETTINGS = (
    {**FEW, "preemption_mode": "recompute", "max_num_batched_tokens": 48},
    {**FEW, "preemption_mode": "swap", "async_scheduling": True, "num_scheduler_steps": 3},
)


def answers(jobs, **settings):
    engine = make_engine(**settings)
    try:
        results = drive(engine, jobs, aborts=False)
        if "preemption_mode" in settings:
            assert engine.client.call_utility("get_metrics")["num_preemptions"] > 0  # else the test would show nothing
        return results
    finally:
        engine.shutdown()


@pytest.mark.parametrize(("jobs", "option"), OPTIONS)
def test_the_scheduler_does_not_change_outputs(jobs, option):
    expected = answers(jobs, **option, enable_prefix_caching=False)
    assert expected != answers(jobs, enable_prefix_caching=False)  # the option is at work
    for settings in SETTINGS:
        assert_same(jobs, answers(jobs, **option, **settings), expected, aborts=False)
