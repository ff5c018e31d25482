"""Random requests with random parameters on engines with random settings, disturbed in mid-run.
Each answer equals that of the request alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from quire import LLMEngine, SamplingParams
from quire.tests.answers import answer_alone, assert_same
from quire.tests.client_forms import closing, make_engine
from quire.tests.feature_requests import STRUCTURES
from quire.tests.feature_run import BLOCK_BYTES, FEW_BLOCKS, PLAIN, Feature, learn_grammars, run
from quire.tests.features import BEAMS, PAUSE
from quire.tests.workloads import Job

NUM_MIXES, ALL_MIXES = 1, 200
VOCAB_SIZE = 2048


@pytest.fixture(scope="module")
def plain() -> Iterator[LLMEngine]:
    with closing(make_engine(**PLAIN)) as engine:
        yield engine


def random_params(rng: random.Random) -> SamplingParams:
    """Set each parameter in about a quarter of the requests. Structured output excludes parameters
    that could leave it no token.
    """

    def sometimes(share: float = 0.25, **parameters: Any) -> dict[str, Any]:
        return parameters if rng.random() < share else {}

    temperature, max_tokens = rng.choice([0.0, 0.0, 0.8, 1.2]), rng.randint(1, 24)
    values = dict(
        temperature=temperature,
        seed=rng.randrange(2**62),
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.7,
    )
    values |= sometimes(0.4 if temperature else 0.0, n=rng.randint(2, 5))
    values |= (
        sometimes(top_k=rng.choice([1, 5, 50]))
        | sometimes(top_p=rng.choice([0.5, 0.9]))
        | sometimes(min_p=0.05)
    )
    values |= sometimes(repetition_penalty=rng.choice([0.8, 1.3])) | sometimes(
        presence_penalty=rng.choice([-1.0, 1.0])
    )
    values |= sometimes(frequency_penalty=rng.choice([-0.5, 1.0])) | sometimes(
        logit_bias={rng.randrange(VOCAB_SIZE): rng.choice([-100.0, 5.0])}
    )
    values |= sometimes(logprobs=rng.choice([0, 3, 20])) | sometimes(
        prompt_logprobs=rng.choice([0, 2])
    )
    values |= sometimes(
        stop=[rng.choice("aeiou") + rng.choice("nrst ")],
        include_stop_str_in_output=rng.random() < 0.5,
    )
    values |= sometimes(stop_token_ids=rng.sample(range(VOCAB_SIZE), 60)) | sometimes(
        0.1, truncate_prompt_tokens=rng.randint(1, 20)
    )
    if rng.random() < 0.25:
        return SamplingParams(
            **values
            | dict(structured_outputs=rng.choice(STRUCTURES), ignore_eos=False, max_tokens=30)
        )
    values |= sometimes(min_tokens=rng.randint(0, max_tokens)) | sometimes(bad_words=["the", "and"])
    return SamplingParams(
        **values | sometimes(0.1, allowed_token_ids=rng.sample(range(VOCAB_SIZE), 300))
    )


def random_jobs(rng: random.Random) -> list[Job]:
    """Make four to ten requests. Most of them begin like the one before."""
    jobs: list[Job] = []
    for i in range(rng.randint(4, 10)):
        beginning = (
            jobs[-1].prompt_token_ids[: rng.randint(1, 40)] if jobs and rng.random() < 0.6 else []
        )
        prompt = (beginning + [rng.randrange(10, 1500) for _ in range(rng.randint(1, 30))])[:55]
        jobs.append(
            Job(f"job-{i}", prompt, random_params(rng), rng.randint(-2, 2), rng.randrange(10), None)
        )
    return jobs


def random_settings(rng: random.Random) -> dict[str, Any]:
    settings = dict(
        enable_prefix_caching=rng.random() < 0.6,
        num_gpu_blocks_override=rng.choice([FEW_BLOCKS, FEW_BLOCKS, FEW_BLOCKS + 3, 300]),
        preemption_mode=rng.choice(["recompute", "swap", "auto"]),
        swap_space=rng.choice([0, 3, 8, 1000]) * BLOCK_BYTES / 2**30,
        num_scheduler_steps=rng.choice([1, 1, 2, 4, 9]),
        async_scheduling=rng.random() < 0.5,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        max_num_seqs=rng.choice([1, 3, 5, 16]),
        max_num_batched_tokens=rng.choice([8, 16, 33, 2048]),
        long_prefill_token_threshold=rng.choice([0, 0, 3, 20]),
        enable_jump_forward=rng.random() < 0.5,
    )
    if settings["enable_prefix_caching"]:
        settings["kv_offloading_size"] = rng.choice([None, 0.001, 0.05])  # 25 blocks, or all
    return settings | rng.choice(
        [
            {},
            {},
            {},
            dict(
                enable_chunked_prefill=False,
                max_num_batched_tokens=2048,
                long_prefill_token_threshold=0,
            ),
        ]
    )


def _sleep_and_wake_up(engine: LLMEngine) -> str:
    engine.call_utility("sleep", 1)
    engine.call_utility("wake_up")
    return "slept"


def _reset_the_prefix_cache(engine: LLMEngine) -> str:
    assert engine.reset_prefix_cache(reset_running=True)
    return "forgot"


def _reload_the_same_weights(engine: LLMEngine) -> str:
    engine.call_utility("load_weights", engine.config.model_config.model)
    return "loaded"


DISTURBANCES = [PAUSE, BEAMS] + [
    Feature(function.__name__, lambda seen: None, disturb=function)
    for function in (_sleep_and_wake_up, _reset_the_prefix_cache, _reload_the_same_weights)
]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.slow if seed >= NUM_MIXES else ())
        for seed in range(ALL_MIXES)
    ],
)
def test_answers_equal_those_alone(plain: LLMEngine, seed: int) -> None:
    rng = random.Random(seed)
    jobs = random_jobs(rng)
    learn_grammars(plain, jobs)
    alone = answer_alone(plain, jobs)
    for _ in range(2):
        settings = random_settings(rng)
        with closing(make_engine(**PLAIN | settings)) as engine:
            seen = run(engine, jobs, rng.choice(DISTURBANCES))
            assert_same(seen.answers, alone)
            assert not engine.scheduler_state()["requests"]
            assert (
                engine.get_metrics()["num_free_blocks"] == settings["num_gpu_blocks_override"] - 1
            )
