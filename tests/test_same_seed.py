"""The same seed gives the same tokens, whatever else the engine does.

In fp32 every token is equal: alone and beside others, preempted, chunked, with a warm cache,
through every client, as a separate request and as one of n. The effect of bf16 is measured, not
tested: tests/bench/bench_bf16_invariance.py.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from quire import LLMEngine, SamplingParams, StructuredOutputsParams
from quire.ipc.params import child_seed
from quire.tests.client_forms import (
    ASYNCIO,
    BLOCKING,
    blocking_engine,
    closing,
    make_async_engine,
    make_engine,
)
from quire.tests.workloads import Job, Result, assert_same, drive, drive_async, random_jobs

WAYS_TO_SAMPLE = (
    dict(),
    dict(temperature=1.7),
    dict(top_k=20),
    dict(top_p=0.8),
    dict(min_p=0.02),
    dict(top_k=50, top_p=0.9, min_p=0.01),
    dict(presence_penalty=1.0),
    dict(frequency_penalty=0.7),
    dict(repetition_penalty=1.3),
    dict(logit_bias={500: 4.0, 501: -100.0}),
    dict(top_p=0.9, presence_penalty=-0.5, repetition_penalty=1.2),
    dict(top_k=100, min_tokens=10, logprobs=2),
    dict(n=3),
    dict(n=4, top_p=0.9, frequency_penalty=0.5),
    dict(stop=["e", " th"], prompt_logprobs=1),
    dict(
        structured_outputs=StructuredOutputsParams(regex="[a-z ]{20,60}"),
        ignore_eos=False,
        top_p=0.95,
    ),
)


def make_jobs(first_seed: int) -> list[Job]:
    """Make one request per way to sample. Every other prompt begins like the one before."""
    rng, jobs = random.Random(5), []
    for i, way in enumerate(WAYS_TO_SAMPLE):
        beginning = jobs[-1].prompt_token_ids[:40] if i % 2 else []
        prompt = beginning + [rng.randrange(10, 1500) for _ in range(rng.randint(5, 90))]
        params = SamplingParams(
            **{
                "temperature": 1.0,
                "seed": first_seed + 1000 * i,
                "max_tokens": 20,
                "ignore_eos": i % 3 > 0,
            }
            | way
        )
        jobs.append(
            Job(f"seeded-{i}", prompt, params, priority=i % 3, arrives_at_step=0, abort_after=None)
        )
    return jobs


JOBS = make_jobs(first_seed=2**40)
FEW = dict(block_size=8, num_gpu_blocks_override=49, max_model_len=384)


def one_by_one(engine: LLMEngine, jobs: list[Job]) -> dict[str, Result]:
    results: dict[str, Result] = {}
    for job in jobs:
        results |= drive(engine, [job], check=False)
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, Result]:
    with closing(make_engine(enable_prefix_caching=False)) as engine:
        return one_by_one(engine, JOBS)


def test_another_seed_gives_other_tokens(alone):
    """Without this, equal tokens would prove nothing."""
    with closing(make_engine()) as engine:
        others = one_by_one(engine, make_jobs(first_seed=77))
    assert all(others[job.request_id].token_ids != alone[job.request_id].token_ids for job in JOBS)


def test_in_a_batch_of_64(alone):
    neighbours = random_jobs(60, vocab_size=1500, seed=9, max_prompt=100, max_output=30)
    jobs = [*JOBS, *(replace(job, arrives_at_step=0) for job in neighbours)]
    most_running = 0

    def watch(step, outputs):
        nonlocal most_running
        most_running = max(most_running, engine.stats.num_running)

    with closing(make_engine(max_num_seqs=100, max_num_batched_tokens=8192)) as engine:
        assert_same(JOBS, drive(engine, jobs, aborts=False, watch=watch), alone)
    assert most_running >= 64


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("settings", "counter"),
    [
        (dict(max_num_batched_tokens=16), None),
        (dict(max_num_batched_tokens=64), None),
        (dict(max_num_batched_tokens=2048), None),
        (dict(**FEW, preemption_mode="recompute"), "num_recomputed_tokens"),
        (
            dict(
                **FEW,
                preemption_mode="recompute",
                enable_prefix_caching=False,
                max_num_batched_tokens=32,
            ),
            "num_recomputed_tokens",
        ),
        (dict(**FEW, preemption_mode="swap", enable_prefix_caching=False), "num_blocks_swapped_in"),
        (dict(num_scheduler_steps=5), None),
        (dict(async_scheduling=True), None),
        (
            dict(
                **FEW,
                async_scheduling=True,
                num_scheduler_steps=3,
                preemption_mode="swap",
                scheduling_policy="priority",
            ),
            "num_blocks_swapped_in",
        ),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) if isinstance(s, dict) else "",
)
def test_step_composition_does_not_change_tokens(alone, settings, counter):
    with closing(make_engine(**settings)) as engine:
        assert_same(JOBS, drive(engine, JOBS), alone)
        # otherwise the test would prove nothing
        assert counter is None or engine.get_metrics()[counter] > 0


def test_with_a_warm_cache(alone):
    with closing(make_engine()) as engine:
        drive(engine, JOBS)
        warm = drive(engine, JOBS)
    assert_same(JOBS, warm, alone)
    assert sum(result.num_cached_tokens for result in warm.values()) > 0.5 * sum(
        len(job.prompt_token_ids) for job in JOBS
    )


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("client", BLOCKING)
def test_through_every_blocking_client(alone, client, tmp_path: Path):
    with blocking_engine(client, tmp_path) as engine:
        assert_same(JOBS, drive(engine, JOBS), alone)


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("client", ASYNCIO)
def test_through_every_asyncio_client(alone, client):
    async def main() -> dict[str, Result]:
        engine = make_async_engine(client)
        try:
            return await drive_async(engine, JOBS)
        finally:
            engine.shutdown()

    assert_same(JOBS, asyncio.run(main()), alone)


def test_each_of_n_completions_equals_the_request_with_its_seed(alone):
    """Completion i of a request with n > 1 is the request with child_seed(seed, i) and n = 1."""
    with closing(make_engine()) as engine:
        for job in JOBS:
            for i, token_ids in enumerate(
                (alone[job.request_id].token_ids, *alone[job.request_id].siblings)
            ):
                params = msgspec.structs.replace(
                    job.params, n=1, seed=child_seed(job.params.seed, i)
                )
                [single] = one_by_one(
                    engine, [Job(f"single-{i}", job.prompt_token_ids, params, 0, 0, None)]
                ).values()
                assert single.token_ids == token_ids, (job, i)
    assert max(len(result.siblings) for result in alone.values()) == 3
