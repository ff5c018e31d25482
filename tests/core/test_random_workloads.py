"""Random workloads through the engine core: no setting changes an output, integrity holds after
every step, nothing is leaked.
"""

import dataclasses
import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.engine_core import EngineCore
from quire.core.request import split
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.models.kv_layout import make_layout
from quire.ipc.models.vision_config import VisionConfig
from quire.ipc.params import SamplingParams
from quire.tests.core.engine_loop import Answer, assert_nothing_left, collect, make_core, step
from quire.tests.fake_encoder import VISION, WHOLE, read_prompt, with_images
from quire.tests.fakes import expected_output, make_config


@dataclass(frozen=True)
class Job:
    request: EngineCoreRequest
    client_index: int
    arrives_at_step: int
    abort_at_step: int | None


def random_jobs(
    seed: int, num_jobs: int, max_prompt: int = 200, max_output: int = 40, families: bool = True
) -> list[Job]:
    """Make jobs with random lengths, priorities, seeds, stops, n and aborts. Half of the prompts
    begin like an earlier one.
    """
    rng, jobs = random.Random(seed), []
    for i in range(num_jobs):
        prompt = [rng.randrange(97) for _ in range(int(max_prompt ** rng.random()))]
        if jobs and rng.random() < 0.5:
            earlier = rng.choice(jobs).request.prompt_token_ids
            prompt = (earlier[: rng.randint(1, len(earlier))] + prompt)[:max_prompt]
        max_tokens = rng.randint(1, max_output)
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 5]) if families else 1,
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**40),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, max_tokens // 2]),
            stop_token_ids=rng.sample(range(97), 3) if rng.random() < 0.4 else None,
        )
        request = EngineCoreRequest(
            f"job-{i}",
            prompt,
            params,
            eos_token_ids=rng.choice([[], [13], [13, 14]]),
            priority=rng.randint(-2, 2),
            cache_salt=rng.choice([None, None, None, "salt"]),
        )
        abort_at_step = rng.randrange(60) if rng.random() < 0.15 else None
        jobs.append(Job(request, rng.randrange(3), rng.randrange(30), abort_at_step))
    return jobs


def drive(core: EngineCore, jobs: list[Job], aborts: bool = True) -> dict[str, Answer]:
    """Add the jobs at their steps and run until all are answered. Check integrity after
    every step.
    """
    answers: dict[int, dict[str, Answer]] = {}
    owners = {
        request.request_id: job.client_index for job in jobs for request in split(job.request)
    }
    last_arrival = max(job.arrives_at_step for job in jobs)
    step_index = 0
    while core.has_work() or step_index <= last_arrival:
        for job in jobs:
            if job.arrives_at_step == step_index:
                core.add_request(job.request, job.client_index)
            if aborts and job.abort_at_step == step_index:
                core.abort_requests([_to_abort(job)], job.client_index)
        for client_index, outputs in step(core).items():
            collect(outputs, answers.setdefault(client_index, {}))
        step_index += 1
        assert step_index < 10_000, core.observer.scheduler_state()
    assert all(
        owners[request_id] == client for client, rows in answers.items() for request_id in rows
    )
    return {request_id: answer for rows in answers.values() for request_id, answer in rows.items()}


def _to_abort(job: Job) -> str:
    """Return the ids to abort: a whole request with n > 1, or one of its children."""
    last_child = split(job.request)[-1].request_id
    return last_child if job.abort_at_step % 2 else job.request.request_id


def assert_as_expected(core: EngineCore, jobs: list[Job], answers: dict[str, Answer]) -> None:
    """Compare with the oracle. An aborted answer is a prefix of the oracle's."""
    children = [(job, request) for job in jobs for request in split(job.request)]
    assert answers.keys() == {request.request_id for _, request in children}
    for job, request in children:
        answer = answers[request.request_id]
        expected = expected_output(
            read_prompt(request), request.sampling_params, request.eos_token_ids, core.config
        )
        if answer.reason is FinishReason.ABORT:
            assert (
                job.abort_at_step is not None and answer.tokens == expected[0][: len(answer.tokens)]
            )
        else:
            assert (answer.tokens, answer.reason, answer.stop_reason) == expected, request


SETTINGS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([16, 64, 2048]),
        # of the groups of layers; 0: the whole context
        "windows": st.sampled_from([(0,), (0,), (40,), (0, 40), (0, 1, 17, 17, 100)]),
        # blocks beside those of one sequence
        "spare_blocks": st.sampled_from([0, 7, 23, 983]),
        "max_num_seqs": st.sampled_from([1, 3, 8, 64]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.booleans(),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5, 37]),
        "preemption_mode": st.sampled_from(["auto", "recompute", "swap"]),
        # of the fake executor: room for all requests, or for 20 blocks
        "swap_space": st.sampled_from([4.0, 0.02]),
        "num_scheduler_steps": st.sampled_from([0, 0, 1, 2, 7]),
        "burst_weights_bytes": st.sampled_from([0, 10**5, 2 * 10**7]),
        "async_scheduling": st.booleans(),
        # steps in flight
        "pipeline_parallel_size": st.sampled_from([1, 1, 2, 3, 5]),
    }
)


# arguments of make_core that are no settings
OF_FAKES = "windows", "burst_weights_bytes", "vision", "num_state_checkpoints"


def make_tight_core(spare_blocks: int, **arguments) -> EngineCore:
    """Make an engine core with room for one sequence and `spare_blocks` blocks."""
    config = make_config(**{k: v for k, v in arguments.items() if k not in OF_FAKES})
    needed = make_layout(config, arguments["windows"]).most_blocks(256)
    return make_core(**arguments, num_gpu_blocks_override=1 + needed + spare_blocks)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_jobs=st.integers(1, 30),
    arguments=SETTINGS,
    rows_per_s=st.sampled_from([0, 100]),
)
def test_no_setting_changes_an_output_or_leaks(seed, num_jobs, arguments, rows_per_s):
    core, jobs = make_tight_core(**arguments), random_jobs(seed, num_jobs)
    core.pace_outputs(rows_per_s)
    assert_as_expected(core, jobs, drive(core, jobs))
    assert_nothing_left(core)


def with_pictures(job: Job, most: int, vision: VisionConfig) -> Job:
    """The job with images in its prompt of at most `most` tokens."""
    tokens = job.request.prompt_token_ids[:most]
    prompt, images = with_images(tokens, most, may_split=vision is VISION)
    request = msgspec.structs.replace(job.request, prompt_token_ids=prompt, images=images)
    return dataclasses.replace(job, request=request)


IMAGE_SETTINGS = st.fixed_dictionaries(
    {
        "vision": st.sampled_from([VISION, WHOLE]),
        "encoder_cache_tokens": st.sampled_from([12, 30, 1000]),
        "max_encoder_tokens": st.sampled_from([1, 9, 100]),
        "num_state_checkpoints": st.sampled_from([None, None, 5]),
    }
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_jobs=st.integers(1, 20),
    arguments=SETTINGS,
    of_images=IMAGE_SETTINGS,
)
def test_no_setting_changes_an_output_about_images(seed, num_jobs, arguments, of_images):
    if of_images["num_state_checkpoints"] is not None:  # states have no windows, nor whole images
        arguments = arguments | {"windows": (0,)}
        of_images = of_images | {"vision": VISION}
    core, vision = make_tight_core(**arguments, **of_images), of_images["vision"]
    jobs = [with_pictures(job, 200, vision) for job in random_jobs(seed, num_jobs, max_prompt=120)]
    assert_as_expected(core, jobs, drive(core, jobs))
    assert_nothing_left(core)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([17, 30, 1000]),
    policy=st.sampled_from(["fcfs", "priority"]),
    vision=st.sampled_from([None, VISION, WHOLE]),
)
def test_whole_prompts_give_the_same_outputs(seed, num_blocks, policy, vision):
    core = make_core(
        enable_chunked_prefill=False,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=num_blocks,
        scheduling_policy=policy,
        vision=vision,
        encoder_cache_tokens=180,
        max_encoder_tokens=20,
    )
    jobs = random_jobs(seed, 15)
    if vision is not None:
        jobs = [with_pictures(job, 180, vision) for job in jobs]
    assert_as_expected(core, jobs, drive(core, jobs))
    assert_nothing_left(core)


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_batched_tokens": 16},
        pytest.param(
            {"max_num_batched_tokens": 64, "enable_prefix_caching": False}, marks=pytest.mark.slow
        ),
        {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "num_gpu_blocks_override": 2000},
        pytest.param({"num_gpu_blocks_override": 17, "max_num_seqs": 16}, marks=pytest.mark.slow),
        {
            "num_gpu_blocks_override": 20,
            "enable_prefix_caching": False,
            "scheduling_policy": "priority",
            "max_num_batched_tokens": 64,
        },
        {
            "num_gpu_blocks_override": 17,
            "max_num_seqs": 16,
            "async_scheduling": True,
            "num_scheduler_steps": 4,
        },
        {
            "num_gpu_blocks_override": 17,
            "max_num_seqs": 16,
            "async_scheduling": True,
            "preemption_mode": "swap",
        },
        pytest.param(
            {
                "num_gpu_blocks_override": 30,
                "max_num_seqs": 16,
                "pipeline_parallel_size": 3,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_two_hundred_requests(arguments):
    core, jobs = make_core(**arguments), random_jobs(seed=7, num_jobs=200)
    assert_as_expected(core, jobs, drive(core, jobs))
    assert_nothing_left(core)
    if arguments.get("num_gpu_blocks_override", 2000) < 100:
        # with more blocks nothing would be preempted
        assert core.observer.get_metrics()["num_preemptions"] > 20


def test_a_warm_cache_gives_the_same_outputs():
    core, jobs = make_core(num_gpu_blocks_override=1000), random_jobs(seed=3, num_jobs=60)
    cold = drive(core, jobs, aborts=False)
    warm = drive(core, jobs, aborts=False)
    assert_as_expected(core, jobs, cold)
    assert_as_expected(core, jobs, warm)
    assert sum(a.num_cached_tokens for a in warm.values()) > 1.5 * sum(
        a.num_cached_tokens for a in cold.values()
    )


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), cut=st.integers(1, 60))
def test_a_second_engine_continues_after_the_first_one_died(seed, cut):
    jobs = [Job(job.request, 0, 0, None) for job in random_jobs(seed, 12, families=False)]
    first, answers = make_core(max_num_batched_tokens=64), {}
    for job in jobs:
        first.add_request(job.request)
    for _ in range(cut):
        for outputs in step(first).values():
            collect(outputs, answers)
    second = make_core(num_gpu_blocks_override=20)
    for job in jobs:
        answer = answers.setdefault(job.request.request_id, Answer())
        answer.num_cached_tokens = None  # the second engine reports only its own tokens
        if answer.reason is None:
            old = job.request
            second.add_request(
                EngineCoreRequest(
                    old.request_id,
                    old.prompt_token_ids,
                    old.sampling_params,
                    eos_token_ids=old.eos_token_ids,
                    resume_tokens=list(answer.tokens),
                )
            )
    while second.has_work():
        for outputs in step(second).values():
            collect(outputs, answers)
    assert_as_expected(second, jobs, answers)
    assert_nothing_left(second)
