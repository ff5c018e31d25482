"""Every feature that changes how a token is chosen or reported gives the same tokens and
log-probabilities on every path of the engine.
"""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
import torch
from quire import EngineArgs, LLMEngine
from quire.tests.workloads import Job, random_jobs

VOCAB_SIZE = 1500
# One long request fits; the others preempt each other all the time.
FEW = dict(block_size=8, num_gpu_blocks_override=27)
DEFAULTS = dict(
    dtype="float32",
    max_model_len=200,
    max_num_seqs=24,
    num_gpu_blocks_override=800,
    max_num_batched_tokens=2048,
    num_threads=1,
    logits_processors=["quire.tests.test_sampling_equalities:every_third"],
)


def every_third(params):
    """Forbid two of three tokens. Which ones depends on the number of output tokens."""
    if not params.extra_args:
        return None

    def process(prompt_token_ids, output_token_ids, logits):
        phase = (len(prompt_token_ids) + len(output_token_ids)) % 3
        kept = torch.full_like(logits, float("-inf"))
        kept[phase::3] = logits[phase::3]
        return kept

    return process


def with_features(job: Job, rng: random.Random) -> Job:
    """Apply each feature to some of the requests, several to most."""
    features = {
        "repetition_penalty": rng.choice([1.0, 1.3]),
        "frequency_penalty": rng.choice([0.0, 0.5]),
        "presence_penalty": rng.choice([0.0, -0.5]),
        "logit_bias": rng.choice([None, {rng.randrange(VOCAB_SIZE): 3.0 for _ in range(5)}]),
        "allowed_token_ids": rng.choice([None, None, rng.sample(range(VOCAB_SIZE), 700)]),
        "bad_words": rng.choice([None, ["the", "a", "story"]]),
        "min_tokens": rng.choice([0, rng.randint(0, job.params.max_tokens)]),
        "logprobs": rng.choice([None, None, 0, 3]),
        "prompt_logprobs": rng.choice([None, None, 0, 2]),
        "extra_args": rng.choice([None, None, {"every": 3}]),
    }
    return dataclasses.replace(job, params=msgspec.structs.replace(job.params, **features))


RNG = random.Random(4)
JOBS = [
    with_features(job, RNG)
    for job in random_jobs(60, VOCAB_SIZE, seed=9, max_prompt=150, max_output=32)
]


def make_engine(**settings) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(**{**DEFAULTS, **settings}), engine="inproc")


def drive(engine: LLMEngine, jobs: list[Job]) -> dict[str, object]:
    """Return the last output of each request. Some requests arrive while others run."""
    waiting, last = list(jobs), {}
    while waiting or engine.has_unfinished_requests():
        for job in waiting[:5]:
            engine.add_request(
                job.request_id,
                {"prompt_token_ids": job.prompt_token_ids},
                job.params,
                priority=job.priority,
            )
        del waiting[:5]
        last |= {output.request_id: output for output in engine.step()}
        engine.client.call_utility("check_integrity")
    return last


@pytest.fixture(scope="module")
def expected():
    """Run one request at a time with an empty cache."""
    engine = make_engine(enable_prefix_caching=False)
    try:
        return {name: output for job in JOBS for name, output in drive(engine, [job]).items()}
    finally:
        engine.shutdown()


def assert_close(have: list | None, want: list | None) -> None:
    """Compare the log-probabilities of the same positions: those of the chosen token, and of the
    other tokens that both list (tied neighbours may differ).
    """
    assert (have is None) == (want is None)
    for mine, theirs in zip(have or [], want or [], strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert next(iter(mine)) == next(iter(theirs)) and len(mine) == len(theirs)
        for token_id in mine.keys() & theirs.keys():
            assert mine[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=1e-3)


def assert_same(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        have, have_tokens, want_tokens = got[name], got[name].outputs[0], want.outputs[0]
        assert list(have_tokens.token_ids) == list(want_tokens.token_ids), name
        assert (have_tokens.text, have_tokens.finish_reason, have_tokens.stop_reason) == (
            want_tokens.text,
            want_tokens.finish_reason,
            want_tokens.stop_reason,
        )
        assert_close(have_tokens.logprobs, want_tokens.logprobs)
        assert_close(have.prompt_logprobs, want.prompt_logprobs)


def test_the_workload_covers_every_feature(expected):
    for job in JOBS:
        output, params = expected[job.request_id], job.params
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        assert completion.finish_reason in ("stop", "length") and len(tokens) >= params.min_tokens
        assert params.allowed_token_ids is None or set(tokens) <= set(params.allowed_token_ids)
        if params.extra_args:
            assert all(
                (len(job.prompt_token_ids) + i) % 3 == token_id % 3
                for i, token_id in enumerate(tokens)
            )
        if params.logprobs is not None:
            assert [next(iter(position)) for position in completion.logprobs] == tokens
        if params.prompt_logprobs is not None:
            assert [
                next(iter(position)) for position in output.prompt_logprobs[1:]
            ] == job.prompt_token_ids[1:]
    defaults = {
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "min_tokens": 0,
    }
    for name in (
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "extra_args",
    ):
        assert sum(getattr(job.params, name) != defaults.get(name) for job in JOBS) >= 10


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(max_num_batched_tokens=24),
        dict(**FEW, preemption_mode="recompute"),
        dict(**FEW, preemption_mode="swap", max_num_batched_tokens=64),
        dict(num_scheduler_steps=4),
        dict(async_scheduling=True, max_num_batched_tokens=64),
        dict(**FEW, async_scheduling=True, num_scheduler_steps=3),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "together",
)
def test_settings_do_not_change_tokens_or_logprobs(expected, settings):
    engine = make_engine(**settings)
    try:
        assert_same(drive(engine, JOBS), expected)
        if settings.items() >= FEW.items():
            # otherwise the test would prove nothing
            assert engine.client.call_utility("get_metrics")["num_preemptions"] >= 5
    finally:
        engine.shutdown()


def test_a_warm_cache_does_not_change_tokens_or_logprobs(expected):
    engine = make_engine()
    try:
        drive(engine, JOBS)
        warm = drive(engine, JOBS)
        assert_same(warm, expected)
        for job in JOBS:  # prompt log-probabilities need the whole prompt computed
            assert job.params.prompt_logprobs is None or warm[job.request_id].num_cached_tokens == 0
        assert sum(output.num_cached_tokens for output in warm.values()) > 500
    finally:
        engine.shutdown()
