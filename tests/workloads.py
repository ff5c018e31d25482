"""A random workload and the loop that drives it through an LLMEngine.

All execution paths whose outputs must agree use it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quire import AsyncLLM, LLMEngine, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Job:
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    arrives_at_step: int
    abort_after: int | None  # output tokens seen by the caller, then it aborts


@dataclass(frozen=True)
class Result:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    num_cached_tokens: int | None
    siblings: tuple[tuple[int, ...], ...]  # tokens of the other completions, where n > 1


def random_jobs(
    num_jobs: int, vocab_size: int, seed: int, max_prompt: int = 300, max_output: int = 48
) -> list[Job]:
    """Make jobs with random lengths, priorities, seeds, stops and aborts.

    Half of the prompts share a prefix with an earlier one, as chats do.
    """
    rng = random.Random(seed)
    jobs: list[Job] = []
    for i in range(num_jobs):
        prompt = [rng.randrange(10, vocab_size) for _ in range(int(max_prompt ** rng.random()))]
        if jobs and rng.random() < 0.5:
            earlier = rng.choice(jobs).prompt_token_ids
            prompt = (earlier[: rng.randint(1, len(earlier))] + prompt)[:max_prompt]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 0, 5, 40]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            seed=rng.randrange(2**40),
            max_tokens=rng.randint(1, max_output),
            ignore_eos=rng.random() < 0.5,
            stop=[rng.choice("aeiou") + rng.choice("nrst")] if rng.random() < 0.3 else None,
            stop_token_ids=[rng.randrange(vocab_size) for _ in range(20)]
            if rng.random() < 0.3
            else None,
        )
        abort_after = rng.randint(0, 8) if rng.random() < 0.1 else None
        jobs.append(
            Job(f"job-{i}", prompt, params, rng.randint(-2, 2), rng.randrange(40), abort_after)
        )
    return jobs


def drive(
    engine: LLMEngine,
    jobs: list[Job],
    aborts: bool = True,
    check: bool = True,
    watch: Callable[[int, list[RequestOutput]], None] | None = None,
) -> dict[str, Result]:
    """Add the jobs at their arrival steps and step until all are finished.

    `check` verifies the engine's integrity after every step. `watch(step, outputs)` receives the
    outputs of each step and may act on the engine before the next.
    """
    waiting = sorted(jobs, key=lambda job: job.arrives_at_step)
    by_id = {job.request_id: job for job in jobs}
    results: dict[str, Result] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (
            waiting[0].arrives_at_step <= step or not engine.has_unfinished_requests()
        ):
            job = waiting.pop(0)
            engine.add_request(
                job.request_id,
                {"prompt_token_ids": job.prompt_token_ids},
                job.params,
                priority=job.priority,
            )
            if aborts and job.abort_after == 0:
                engine.abort_request([job.request_id])
        outputs = engine.step()
        for output in outputs:
            job = by_id[output.request_id]
            results[output.request_id] = _result(output)
            if (
                aborts
                and not output.finished
                and job.abort_after is not None
                and len(output.outputs[0].token_ids) >= job.abort_after > 0
            ):
                engine.abort_request([output.request_id])
        if check:
            engine.client.call_utility("check_integrity")
        if watch is not None:
            watch(step, outputs)
        step += 1
    return results


async def drive_async(engine: AsyncLLM, jobs: list[Job]) -> dict[str, Result]:
    """Run the same jobs as concurrent asyncio tasks.

    All tasks start at once. A caller that aborts leaves its stream.
    """

    async def run(job: Job) -> tuple[str, Result | None]:
        result = None
        stream = engine.generate(
            {"prompt_token_ids": job.prompt_token_ids},
            job.params,
            job.request_id,
            priority=job.priority,
        )
        async for output in stream:
            result = _result(output)
            if (
                not output.finished
                and job.abort_after is not None
                and len(result.token_ids) >= job.abort_after
            ):
                await engine.abort(job.request_id)
                break
        return job.request_id, result

    return {
        request_id: result
        for request_id, result in await asyncio.gather(*map(run, jobs))
        if result is not None
    }


def _result(output: Any) -> Result:
    completion, *others = output.outputs
    siblings = tuple(tuple(other.token_ids) for other in others)
    return Result(
        tuple(completion.token_ids),
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        output.num_cached_tokens,
        siblings,
    )


def assert_same(
    jobs: list[Job], got: dict[str, Result], expected: dict[str, Result], aborts: bool = True
) -> None:
    """Assert that finished requests are equal in every field.

    An aborted request must be a prefix of its complete output.
    """
    for job in jobs:
        want = expected[job.request_id]
        have = got.get(job.request_id)
        if (
            aborts
            and job.abort_after is not None
            and (have is None or have.finish_reason in (None, "abort"))
        ):
            if have is not None:
                assert have.token_ids == want.token_ids[: len(have.token_ids)], job
            continue
        assert have is not None, f"{job.request_id} has no result"
        assert replace(have, num_cached_tokens=0) == replace(want, num_cached_tokens=0), (
            f"{job}\n got {have}\nwant {want}"
        )
