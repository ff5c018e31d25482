"""Models with sliding windows, and caches of other types, give the same outputs whatever the
scheduler does with a request.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from quire.kernels.cpu.native.library import library
from quire.tests.client_forms import make_engine
from quire.tests.workloads import assert_same, drive, random_jobs

# Short, since the reference is slow. They arrive together, so that they preempt each other.
JOBS = [
    replace(job, arrives_at_step=0)
    for job in random_jobs(12, vocab_size=1500, seed=2, max_prompt=60)
]
REFERENCE = {"reshape_and_cache": "reference", "paged_attention": "reference"}
OPTIONS = {
    "window": {
        "hf_overrides": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    },
    "fp8": {"kv_cache_dtype": "fp8", "kernels": REFERENCE},
    "int8": {"kv_cache_dtype": "int8", "kernels": REFERENCE if library is None else {}},
}
FEW = {"block_size": 8, "num_gpu_blocks_override": 18}
SETTINGS = (
    {**FEW, "preemption_mode": "recompute", "max_num_batched_tokens": 48},
    {**FEW, "preemption_mode": "swap", "async_scheduling": True, "num_scheduler_steps": 3},
)
# the one layer without a window is a group of its own, and so is each of the others
FEW_OF_GROUPS = 82


def answers(**settings):
    engine = make_engine(max_model_len=128, **settings)
    try:
        results = drive(engine, JOBS, aborts=False)
        if "preemption_mode" in settings:
            # without an effect the test would prove nothing
            assert engine.client.call_utility("get_metrics")["num_preemptions"] > 0
        return results
    finally:
        engine.shutdown()


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_scheduler_does_not_change_outputs(option):
    expected = answers(**OPTIONS[option], enable_prefix_caching=False)
    if option != "int8":  # its error is too small to change one of these tokens
        assert expected != answers(enable_prefix_caching=False)  # the option has an effect
    for settings in SETTINGS:
        if option == "window":
            settings = {**settings, "num_gpu_blocks_override": FEW_OF_GROUPS}
        assert_same(JOBS, answers(**OPTIONS[option], **settings), expected, aborts=False)
