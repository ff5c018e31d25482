"""Models that keep states, in bfloat16 on native kernels: the bits of a request's tokens and
log-probabilities do not depend on the batch, on chunks, on checkpoints, or on speculation.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from quire import LLM, SamplingParams
from quire.tests.client_forms import closing, make_engine
from quire.tests.equalities import (
    NGRAM,
    few_blocks,
    make_jobs,
    needs_native_kernels,
    run_alone,
    settings_with,
)
from quire.tests.test_bit_equalities import assert_same_bits, name_of, run
from quire.tests.tiny_models import save_tiny_model
from quire.tests.workloads import Job

pytestmark = needs_native_kernels

FEW = few_blocks()


@pytest.fixture(scope="module", params=["granitemoehybrid", "mamba2", "kimi_linear"])
def model(request, tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp(request.param)
    return str(save_tiny_model(directory, request.param, dtype="bfloat16"))


def common(model: str) -> dict[str, Any]:
    return dict(model=model, dtype="bfloat16", max_model_len=300, state_checkpoint_interval=64)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return make_jobs(24, max_prompt=200, max_output=40, crowding=4)


@pytest.fixture(scope="module")
def expected(model, jobs):
    return run_alone(common(model), jobs)


SETTINGS = [
    dict(num_threads=2),
    *settings_with(FEW),
    dict(speculative_config=NGRAM, num_threads=2),
]


@pytest.mark.sampled(step=6)
@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_no_setting_changes_a_bit(model, jobs, expected, settings):
    with closing(make_engine(**common(model) | settings)) as engine:
        assert_same_bits(jobs, run(engine, jobs), expected)
        cold = engine.call_utility("get_metrics")
        assert (cold["num_preemptions"] > 0) == (settings.items() >= FEW.items())
        assert (cold["num_accepted_tokens"] > 0) == ("speculative_config" in settings)
        assert_same_bits(jobs, run(engine, jobs, aborts=False), expected, aborts=False)
        warm = engine.call_utility("get_metrics")
        if settings.get("enable_prefix_caching", True):
            assert warm["num_states_restored"] > cold["num_states_restored"]
        # without attention there is nothing in blocks, but a state is swapped all the same
        is_swapping = settings.get("preemption_mode") == "swap"
        assert (warm["num_blocks_swapped_in"] > 0) == is_swapping
        engine.call_utility("check_integrity")


def test_completions_of_one_prompt_start_from_a_checkpoint(model):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(20, 180))}
    answers = []
    for caching in (True, False):
        arguments = common(model) | dict(enable_prefix_caching=caching)
        with LLM(**arguments, engine="inproc") as llm:
            [output] = llm.generate([prompt], params, use_tqdm=False)
            answers.append([completion.token_ids for completion in output.outputs])
            assert llm.get_metrics()["num_states_restored"] == 3
            alone = msgspec.structs.replace(params, n=1)
            [output] = llm.generate([prompt], alone, use_tqdm=False)
            assert output.outputs[0].token_ids == answers[0][0]
    assert answers[0] == answers[1]


@pytest.mark.sampled(step=2)
def test_a_second_turn_starts_where_the_first_one_ended(model):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(**common(model), engine="inproc") as llm:
        prompt = list(range(20, 120))
        [first] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        prompt = [*prompt, *first.outputs[0].token_ids, *range(50, 70)]
        [second] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert second.num_cached_tokens == 128
        assert llm.sleep(1) is None and llm.wake_up() is None
        [again] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert again.num_cached_tokens == 0
        assert again.outputs[0].token_ids == second.outputs[0].token_ids
