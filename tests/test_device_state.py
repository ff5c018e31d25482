"""Engines that keep their request state as on a GPU, with tokens that arrive as late as possible:
outputs equal those of the plain engine on every path.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from quire import LLMEngine, SamplingParams
from quire.executor.models.decoder import Decoder
from quire.executor.worker import Worker
from quire.tests import test_feature_mixes as mixes
from quire.tests.answers import answer_alone
from quire.tests.answers import assert_same as assert_same_answers
from quire.tests.client_forms import MANY_BLOCKS, closing, engine_args, make_engine
from quire.tests.executor.on_device import LateCopies, keep_on_device
from quire.tests.feature_loras import EngineByNumber
from quire.tests.feature_run import PLAIN, learn_grammars, run
from quire.tests.workloads import Job, assert_same, drive, random_jobs

# One request of the longest kind fits; the others preempt each other.
FEW = dict(block_size=8, num_gpu_blocks_override=50)
NUM_MIXES, ALL_MIXES = 2, 100


def with_host_features(
    params: SamplingParams, is_early: bool, rng: random.Random
) -> SamplingParams:
    """Give some early requests features that need the host, so that both kinds of steps occur. Some
    requests have n > 1.
    """
    if rng.random() < 0.1 and params.temperature:
        params = msgspec.structs.replace(params, n=3)
    features = (
        {"repetition_penalty": 1.2},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"min_tokens": 2},
        {"bad_words": ["the"]},
        {"logit_bias": {7: 3.0}},
    )
    return (
        msgspec.structs.replace(params, **rng.choice(features))
        if is_early and rng.random() < 0.5
        else params
    )


def make_jobs(seed: int) -> list[Job]:
    rng = random.Random(seed)
    return [
        replace(job, params=with_host_features(job.params, job.arrives_at_step < 8, rng))
        for job in random_jobs(60, vocab_size=1500, seed=seed)
    ]


JOBS = make_jobs(1)


@pytest.fixture(scope="module")
def expected() -> dict:
    with closing(make_engine(enable_prefix_caching=False)) as engine:
        return drive(engine, JOBS, aborts=False)


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_batched_tokens=64),
        dict(async_scheduling=True, max_num_batched_tokens=64),
        dict(num_scheduler_steps=4),
        dict(async_scheduling=True, num_scheduler_steps=3),
        dict(
            **FEW, async_scheduling=True, preemption_mode="recompute", scheduling_policy="priority"
        ),
        dict(
            **FEW,
            async_scheduling=True,
            num_scheduler_steps=3,
            preemption_mode="swap",
            enable_prefix_caching=False,
        ),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_outputs_equal_those_of_the_plain_engine(expected, settings, monkeypatch):
    copies = LateCopies()
    keep_on_device(monkeypatch, copies, with_graphs=settings.get("num_scheduler_steps") == 4)
    with closing(make_engine(**settings)) as engine:
        assert_same(JOBS, drive(engine, JOBS), expected)
        assert engine.call_utility("scheduler_state")["running"] == []
        metrics = engine.get_metrics()
    assert metrics["num_free_blocks"] == settings.get("num_gpu_blocks_override", MANY_BLOCKS) - 1
    if settings.items() >= FEW.items():
        assert metrics["num_preemptions"] > 5  # with more blocks nothing would be preempted
    when = {event: index for index, event in enumerate(copies.events)}
    # nobody waits for a step that was launched before the last request ended
    num_ahead = sum(
        when.get(f"launched {n + 1}", len(when)) < when.get(f"waits for {n}", len(when))
        for n in range(copies.num_copies)
    )
    assert copies.num_copies > 20 and (num_ahead > 20) == settings.get("async_scheduling", False)


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("settings", "with_graphs"),
    [(dict(), True), (dict(async_scheduling=True, num_scheduler_steps=3), False)],
    ids=["graphs", "overlap"],
)
def test_adapters(settings, with_graphs, monkeypatch):
    """One place for two adapters, so that they change places while steps are in flight."""

    def results(**more: Any) -> dict:
        args = engine_args(enable_lora=True, max_cpu_loras=2, **more)
        with closing(EngineByNumber.from_engine_args(args, engine="inproc")) as engine:
            return drive(engine, JOBS[:16], aborts=False, check=bool(more))

    expected = results()
    keep_on_device(monkeypatch, LateCopies(), with_graphs)
    assert_same(JOBS[:16], results(**settings, max_num_batched_tokens=64), expected, aborts=False)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLMEngine]:
    with closing(make_engine(**PLAIN)) as engine:
        yield engine


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.slow if seed >= NUM_MIXES else ())
        for seed in range(ALL_MIXES)
    ],
)
def test_mixes_of_features_equal_their_answers_alone(plain, seed, monkeypatch):
    """Like test_feature_mixes.py, with other seeds: grammars, penalties, n > 1, sleep, new weights
    in mid-run.
    """
    rng = random.Random(10_000 + seed)
    jobs = mixes.random_jobs(rng)
    learn_grammars(plain, jobs)
    alone, settings = answer_alone(plain, jobs), mixes.random_settings(rng)
    keep_on_device(monkeypatch, LateCopies(), with_graphs=rng.random() < 0.5)
    with closing(make_engine(**PLAIN | settings)) as engine:
        seen = run(engine, jobs, rng.choice(mixes.DISTURBANCES))
        assert_same_answers(seen.answers, alone)
        assert not engine.scheduler_state()["requests"]
        assert engine.get_metrics()["num_free_blocks"] == settings["num_gpu_blocks_override"] - 1


def test_rows_that_are_not_finite_fail_alone_and_at_the_same_token(monkeypatch):
    """Whatever token would be one of some is not a number's: some requests fail, at once or after a
    while, others never.
    """
    compute_logits = Decoder.compute_logits

    def poisoned(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(self, hidden)
        return logits.masked_fill(logits.argmax(-1, keepdim=True) % 29 == 3, float("nan"))

    monkeypatch.setattr(Decoder, "compute_logits", poisoned)
    # a recorded step would not hear of it
    monkeypatch.setattr(Worker, "_make_forward", lambda self: None)
    jobs = random_jobs(40, vocab_size=1500, seed=5)
    with closing(make_engine()) as engine:
        expected = drive(engine, jobs, aborts=False)
    keep_on_device(monkeypatch, LateCopies())
    with closing(make_engine(async_scheduling=True, num_scheduler_steps=4)) as engine:
        assert_same(jobs, drive(engine, jobs), expected)
    lengths = [
        len(result.token_ids) for result in expected.values() if result.finish_reason == "error"
    ]
    assert 5 < len(lengths) < 35 and 0 in lengths and max(lengths) > 3


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("with_graphs", [False, True])
def test_each_group_of_layers_has_its_tables_on_the_device(with_graphs: bool) -> None:
    layer_types = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    window = dict(use_sliding_window=True, sliding_window=21, layer_types=layer_types)
    plain = dict(disable_hybrid_kv_cache_manager=True, enable_prefix_caching=False)
    with closing(make_engine(hf_overrides=window, **plain)) as engine:
        expected = drive(engine, JOBS[:16], aborts=False)
    with pytest.MonkeyPatch.context() as patch:
        keep_on_device(patch, LateCopies(), with_graphs)
        settings = dict(async_scheduling=True, max_num_batched_tokens=64)
        with closing(make_engine(hf_overrides=window, **settings)) as engine:
            assert engine.client._engine.core.executor.kv_cache_windows == (0, 21, 21)
            assert_same(JOBS[:16], drive(engine, JOBS[:16], aborts=False), expected, aborts=False)
