"""Gemma 3n and 4, whose last layers read the keys and values of others and compute only the rows
that are read, in bfloat16 on native kernels: the bits of a request's tokens and log-probabilities
do not depend on the batch, on chunks, on swapping, on bursts, or on speculation.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from quire.executor.program.narrowed import NarrowedForward
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

# with so many blocks, requests are preempted
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "gemma4_text": ({}, 98),
    "gemma3n_text": ({"sliding_window": 96}, 80),
}
FEW = few_blocks(98)
SETTINGS = [*settings_with(FEW), dict(speculative_config=NGRAM, num_threads=2)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def common(kind, tmp_path_factory) -> dict[str, Any]:
    own, path = KINDS[kind][0], tmp_path_factory.mktemp("m")
    directory = save_tiny_model(path, kind, dtype="bfloat16", **own)
    return dict(model=str(directory), dtype="bfloat16", max_model_len=300)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Some request the log-probabilities of their prompts, for which all rows are computed."""
    rng, found = random.Random(5), []
    for job in make_jobs(30, max_prompt=200, max_output=40, crowding=12):
        prompt_logprobs = rng.choice([None] * 5 + [1])
        params = msgspec.structs.replace(job.params, prompt_logprobs=prompt_logprobs)
        found.append(replace(job, params=params))
    return found


@pytest.fixture(scope="module")
def expected(common, jobs):
    return run_alone(common, jobs)


@pytest.mark.sampled(step=6)
@pytest.mark.parametrize("settings", SETTINGS, ids=name_of)
def test_no_setting_changes_a_bit(kind, common, jobs, expected, settings):
    has_few = settings.items() >= FEW.items()
    few = dict(num_gpu_blocks_override=KINDS[kind][1]) if has_few else {}
    with closing(make_engine(**common | settings | few)) as engine:
        executor = engine.client._engine.core.executor
        assert isinstance(executor.runner.run_pass, NarrowedForward)
        assert_same_bits(jobs, run(engine, jobs), expected)
        cold = engine.call_utility("get_metrics")
        assert (cold["num_preemptions"] > 0) == has_few
        assert (cold["num_accepted_tokens"] > 0) == ("speculative_config" in settings)
        assert_same_bits(jobs, run(engine, jobs, aborts=False), expected, aborts=False)
        warm = engine.call_utility("get_metrics")
        is_swapping = settings.get("preemption_mode") == "swap"
        assert (warm["num_blocks_swapped_in"] > 0) == is_swapping
        engine.call_utility("check_integrity")
