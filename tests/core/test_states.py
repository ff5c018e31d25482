"""Models that keep states, through the engine core: no setting changes an output, and a prompt that
begins like an earlier one starts from a checkpoint.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.engine_core import EngineCore
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.models.kv_layout import make_layout
from quire.ipc.params import SamplingParams
from quire.tests.core.engine_loop import assert_nothing_left, make_core, make_request, run, step
from quire.tests.core.test_random_workloads import assert_as_expected, drive, random_jobs
from quire.tests.fakes import expected_output, make_config

SETTINGS = st.fixed_dictionaries(
    {
        "num_state_checkpoints": st.sampled_from([0, 1, 3, 12, 200]),
        "state_checkpoint_interval": st.sampled_from([16, 32, 48, 128, 512]),
        "max_num_batched_tokens": st.sampled_from([16, 64, 2048]),
        "windows": st.sampled_from([(0,), (0,), (0, 40), (40,)]),
        "spare_blocks": st.sampled_from([0, 7, 23, 983]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5, 37]),
        "preemption_mode": st.sampled_from(["auto", "recompute", "swap"]),
        "swap_space": st.sampled_from([4.0, 0.02]),
        "num_scheduler_steps": st.sampled_from([0, 0, 1, 2, 7]),
        "burst_weights_bytes": st.sampled_from([0, 10**5, 2 * 10**7]),
        "async_scheduling": st.booleans(),
        "pipeline_parallel_size": st.sampled_from([1, 1, 1, 3]),
        "block_size": st.sampled_from([8, 16]),
    }
)
OF_THE_EXECUTOR = "windows", "burst_weights_bytes", "num_state_checkpoints"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5}


def make_tight_core(spare_blocks: int, **arguments) -> EngineCore:
    """Make an engine core with room for one sequence and `spare_blocks` blocks."""
    config = make_config(**{k: v for k, v in arguments.items() if k not in OF_THE_EXECUTOR})
    needed = make_layout(config, arguments["windows"]).most_blocks(256)
    return make_core(**arguments, num_gpu_blocks_override=1 + needed + spare_blocks)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_jobs=st.integers(1, 30),
    arguments=SETTINGS,
    drafts=st.sampled_from([None, None, DRAFTS]),
)
def test_no_setting_changes_an_output_or_leaks(seed, num_jobs, arguments, drafts):
    if drafts is not None:
        arguments = {**arguments, "speculative_config": drafts, "pipeline_parallel_size": 1}
    core, jobs = make_tight_core(**arguments), random_jobs(seed, num_jobs)
    assert_as_expected(core, jobs, drive(core, jobs))
    assert_nothing_left(core)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), arguments=SETTINGS, nan=st.integers(0, 20))
def test_failures_leave_no_state_to_others(seed, arguments, nan):
    """A request fails at a random token; the others, which may have begun alike, are right."""
    core, jobs = make_tight_core(**arguments), random_jobs(seed, 20, families=False)
    failing = {job.request.request_id for job in jobs[::4]}
    core.executor.nan_rows = {(request_id, nan) for request_id in failing}
    answers = drive(core, jobs)
    for job in jobs:
        answer, request = answers[job.request.request_id], job.request
        tokens, reason, _ = expected_output(
            request.prompt_token_ids, request.sampling_params, request.eos_token_ids, core.config
        )
        assert answer.tokens == tokens[: len(answer.tokens)]
        if request.request_id not in failing and answer.reason is not FinishReason.ABORT:
            assert (answer.tokens, answer.reason) == (tokens, reason)
    assert_nothing_left(core)
