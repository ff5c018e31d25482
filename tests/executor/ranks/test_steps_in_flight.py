"""Stages with steps in flight, below an engine core: tokens are those of one rank and one step at a
time. The ranks are threads.
"""

from __future__ import annotations

import random
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from quire import EngineArgs
from quire.core.engine_core import EngineCore
from quire.executor.runner.speculation.draft_depth import DraftDepth
from quire.ipc.config import EngineConfig
from quire.ipc.kv_events import KVEventsConfig
from quire.ipc.messages import FinishReason
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.ipc.step_messages import SchedulerOutput
from quire.tests.bundled_model.heads import trained
from quire.tests.core.engine_loop import (
    Answer,
    assert_nothing_left,
    collect,
    greedy,
    make_request,
    run,
    step,
)
from quire.tests.core.kv_cache.test_events import cached_in
from quire.tests.core.test_random_workloads import Job, drive, random_jobs
from quire.tests.executor.driver import start_executor, start_with
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.kv_subscriber import Subscriber


def jobs_of(seed: int, num_jobs: int) -> list[Job]:
    """With prompts and outputs of a few blocks, and all kinds of sampling."""
    rng, jobs = random.Random(seed), []
    for job in random_jobs(seed, num_jobs, max_prompt=90, max_output=25):
        params = msgspec.structs.replace(
            job.request.sampling_params,
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        request = msgspec.structs.replace(job.request, params=params)
        jobs.append(replace(job, request=request, arrives_at_step=rng.randrange(15)))
    return jobs


def check_equal(one: dict[str, Answer], other: dict[str, Answer]) -> None:
    assert one.keys() == other.keys()
    for name, mine in one.items():
        theirs = other[name]
        if FinishReason.ABORT in (mine.reason, theirs.reason):  # after some tokens, or before
            count = min(len(mine.tokens), len(theirs.tokens))
            assert mine.tokens[:count] == theirs.tokens[:count]
        else:
            assert (mine.tokens, mine.reason) == (theirs.tokens, theirs.reason), name
            assert mine.stop_reason == theirs.stop_reason


def run_jobs(executor: Any, config: Any, jobs: list[Job]) -> tuple[dict[str, Answer], EngineCore]:
    core = EngineCore(config, executor, check_every_step=True)
    core.scheduler.limits.least_samples = 1
    answers = drive(core, jobs)
    assert_nothing_left(core)
    return answers, core


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("size", "num_stages", "num_seeds", "mode"),
    [
        (1, 2, 1, "recompute"),
        (1, 3, 1, "swap"),
        (2, 2, 1, "auto"),
        pytest.param(1, 2, 100, "auto", marks=pytest.mark.slow),
        pytest.param(1, 4, 100, "recompute", marks=pytest.mark.slow),
        pytest.param(2, 1, 20, "swap", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_rank(
    tiny, size: int, num_stages: int, num_seeds: int, mode: str
) -> None:
    model = tiny("qwen2", num_hidden_layers=4)
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 6}
    few = {"num_gpu_blocks_override": 20, "preemption_mode": mode}
    num_preemptions = num_swapped = 0
    stages = RankThreads.of(model, size, num_stages, **few, **options)
    one = start_executor(model, **options)
    for seed in range(num_seeds):
        jobs = jobs_of(1000 * num_stages + seed, 10)
        wanted, _ = run_jobs(one, one.config, jobs)
        answers, core = run_jobs(stages, stages.config, jobs)
        check_equal(wanted, answers)
        metrics = core.observer.get_metrics()
        num_preemptions += metrics["num_preemptions"]
        num_swapped += metrics["num_blocks_swapped_in"]
    assert num_preemptions > 0 and (num_swapped > 0 or mode != "swap")
    assert mode != "recompute" or not num_swapped
    stages.shutdown()


def drafting(method: str, size: int, num_stages: int, **arguments: Any) -> EngineConfig:
    """A configuration of the bundled model, whose trained heads are often right."""
    model = "bundled" if method == "draft_model" else trained(method)
    own = {} if method == "ngram" else {"model": model}
    spec = {"method": method, "num_speculative_tokens": 3, "adaptive": False} | own
    settings = {"dtype": "float32", "num_threads": 1, "max_model_len": 256} | arguments
    parallel = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
    args = EngineArgs("bundled", **settings, **parallel, speculative_config=spec)
    return args.create_engine_config()


def without_drafts_and_ranks(config: EngineConfig) -> EngineConfig:
    scheduling = msgspec.structs.replace(config.scheduler_config, speculative_config=None)
    device = msgspec.structs.replace(
        config.device_config, tensor_parallel_size=1, pipeline_parallel_size=1
    )
    return msgspec.structs.replace(config, scheduler_config=scheduling, device_config=device)


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("method", "size", "num_stages"),
    [
        ("eagle3", 1, 3),
        ("ngram", 2, 2),
        pytest.param("ngram", 1, 2, marks=pytest.mark.slow),
        pytest.param("mtp", 1, 2, marks=pytest.mark.slow),
        pytest.param("mtp", 2, 1, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, 2, marks=pytest.mark.slow),
        pytest.param("draft_model", 1, 2, marks=pytest.mark.slow),
        pytest.param("draft_model", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token(method: str, size: int, num_stages: int) -> None:
    """Each kind of rank drafts, or takes the drafts of the last stage, while requests are swapped
    out and in.
    """
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "num_gpu_blocks_override": 20}
    config = drafting(method, size, num_stages, preemption_mode="swap", **options)
    plain = without_drafts_and_ranks(config)
    jobs = jobs_of(4, 8)
    for job in jobs[:3]:  # texts that repeat themselves
        job.request.prompt_token_ids[:] = [5, 9, 12] * 10
    one, ranks = start_with(plain), RankThreads(config)
    wanted, _ = run_jobs(one, plain, jobs)
    answers, core = run_jobs(ranks, config, jobs)
    check_equal(wanted, answers)
    metrics = core.observer.get_metrics()
    assert metrics["num_draft_tokens"] > 0 and metrics["num_blocks_swapped_in"] > 0
    assert metrics["num_accepted_tokens"] > 0 or method == "ngram"
    ranks.shutdown()


@pytest.mark.slow
def test_steps_in_flight_whose_requests_differ_in_the_drafts_they_want(monkeypatch) -> None:
    """A head misses no pass of those that want drafts, whichever step has ended before it."""
    config, num_wanted = drafting("mtp", 1, 2), list[int]()
    scheduling = config.scheduler_config
    wishes = msgspec.structs.replace(scheduling.speculative_config, adaptive=True)
    scheduling = msgspec.structs.replace(scheduling, speculative_config=wishes)
    config = msgspec.structs.replace(config, scheduler_config=scheduling)

    def choose(depth: DraftDepth, step: SchedulerOutput) -> list[int]:
        wanted = [3 * (depth._batch.token_ids[slot, 0] == 1) for slot in step.slots]
        num_wanted.append(sum(map(bool, wanted)))
        return wanted

    monkeypatch.setattr(DraftDepth, "choose", choose)
    monkeypatch.setattr(DraftDepth, "can_gain", lambda *_: True)
    plain = without_drafts_and_ranks(config)
    ranks, found = RankThreads(config), []
    for executor in (start_with(plain), ranks):
        core = EngineCore(executor.config, executor, check_every_step=True)
        core.scheduler.limits.least_samples = 1
        for first in (1, 2):
            core.add_request(make_request(f"r{first}", [first] * 9, greedy(max_tokens=120)))
        found.append({name: one.tokens for name, one in run(core)[0].items()})
    assert found[0] == found[1] and set(num_wanted) == {0, 1}
    assert core.observer.get_metrics()["num_draft_tokens"] > 60
    ranks.shutdown()


@pytest.mark.parametrize(
    ("kind", "size", "num_stages", "num_seeds"),
    [
        ("qwen2", 1, 2, 1),
        pytest.param("qwen3_5_text", 2, 3, 10, marks=pytest.mark.slow),
        pytest.param("qwen2", 1, 2, 30, marks=pytest.mark.slow),
    ],
)
def test_several_passes_of_a_step_go_round_the_stages(
    tiny, kind: str, size: int, num_stages: int, num_seeds: int
) -> None:
    """Requests are swapped out between the passes of their step."""
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "preemption_mode": "swap"}
    num_swapped, model = 0, tiny(kind, num_hidden_layers=4)
    stages = RankThreads.of(
        model, size, num_stages, num_gpu_blocks_override=20, num_scheduler_steps=5, **options
    )
    one = start_executor(model, **options)
    for seed in range(num_seeds):
        jobs = jobs_of(seed, 10)
        wanted, _ = run_jobs(one, one.config, jobs)
        answers, core = run_jobs(stages, stages.config, jobs)
        check_equal(wanted, answers)
        num_swapped += core.observer.get_metrics()["num_blocks_swapped_in"]
    assert num_swapped > 0
    stages.shutdown()


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("kind", "size", "num_stages"),
    [("qwen3_5_text", 1, 2), ("lfm2", 2, 1), ("granitemoehybrid", 2, 2)],
)
def test_states_are_kept_and_restored_on_every_rank(
    tiny, kind: str, size: int, num_stages: int
) -> None:
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "state_checkpoint_interval": 32}
    ranks = RankThreads.of(tiny(kind), size, num_stages, **options)
    one = start_executor(tiny(kind), enable_prefix_caching=False, **options)
    rng, found = random.Random(size), []
    prompts = [[rng.randrange(3, 250) for _ in range(rng.randrange(40, 150))] for _ in range(5)]
    params = greedy(max_tokens=20)
    for executor in (one, ranks):
        core = EngineCore(executor.config, executor, check_every_step=True)
        core.scheduler.limits.least_samples = 1
        tokens = []
        for turn in range(2):
            for i, prompt in enumerate(prompts):
                core.add_request(make_request(f"{turn}-{i}", prompt, params))
            answers = run(core)[0]
            tokens += [answers[f"{turn}-{i}"].tokens for i in range(len(prompts))]
        found.append(tokens)
    assert core.observer.get_metrics()["num_states_restored"] >= len(prompts)
    assert found[0] == found[1]
    ranks.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_have_the_bits_of_one_rank(tiny, dtype: str) -> None:
    model, found = tiny("qwen2", num_hidden_layers=4), []
    stages = RankThreads.of(model, 1, 2, dtype=dtype)
    one = start_executor(model, dtype=dtype, num_scheduler_steps=1)
    params = greedy(max_tokens=9, temperature=0.7, logprobs=3, prompt_logprobs=2)
    for executor, config in ((one, one.config), (stages, stages.config)):
        core, rows = EngineCore(config, executor), []
        core.scheduler.limits.least_samples = 1
        for i in range(6):
            core.add_request(make_request(f"r{i}", [i + 1, 2, 3], params))
        while core.has_work():
            for outputs in step(core).values():
                rows += [
                    (outputs.request_ids[entry.row], bytes(entry.logprobs.data))
                    for entry in (*outputs.logprobs, *outputs.prompt_logprobs)
                ]
        found.append(sorted(rows))
    assert found[0] == found[1] and len(found[0]) == 6 * 10
    stages.shutdown()


def test_a_stage_begins_a_step_before_the_next_stage_has_ended_the_last_one(
    tiny, monkeypatch
) -> None:
    """The last stage ends no step before the first stage has ended the one after it."""
    stages = RankThreads.of(tiny("qwen2"), 1, 2)
    first, last = stages.ranks
    ended, condition, num_waits = set(), threading.Condition(), 0

    def run_first(step: Any, run_step: Any = first.execute_model) -> Any:
        output = run_step(step)
        with condition:
            ended.add(step.step)
            condition.notify_all()
        return output

    def run_last(step: Any, run_step: Any = last.execute_model) -> Any:
        nonlocal num_waits
        output = run_step(step)
        if step.step < 15:
            num_waits += 1
            with condition:
                assert condition.wait_for(lambda: step.step + 1 in ended, 20.0)
        return output

    monkeypatch.setattr(first, "execute_model", run_first)
    monkeypatch.setattr(last, "execute_model", run_last)
    core = EngineCore(stages.config, stages)
    core.scheduler.limits.least_samples = 1
    for i in range(8):
        core.add_request(make_request(f"r{i}", [i + 1, 2], greedy(max_tokens=10)))
    answers = run(core)[0]
    assert num_waits == 15 and max(ended) == 19  # 20 steps of 4 requests
    assert {len(one.tokens) for one in answers.values()} == {10}
    stages.shutdown()


def test_grammars_with_forced_tokens(tiny, monkeypatch) -> None:
    """Tokens that a grammar forces reach the first stage, several at once."""
    model = tiny("qwen2")
    params = SamplingParams(
        temperature=1.0,
        seed=5,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(regex="(a|b) forced text (yes|no)+"),
    )
    answers, counts = [], []
    stages = RankThreads.of(model, 1, 2)
    elsewhere = stages.ranks[0].state.pending
    append = elsewhere.append

    def count(num_sampled: list[int], *args: Any) -> None:
        counts.extend(num_sampled)
        append(num_sampled, *args)

    monkeypatch.setattr(elsewhere, "append", count)
    one = start_executor(model)
    for executor, config in ((one, one.config), (stages, stages.config)):
        core = EngineCore(config, executor)
        core.scheduler.limits.least_samples = 1
        for i in range(4):
            core.add_request(make_request(f"r{i}", [i + 1, 2, 3], params, eos_token_ids=[2]))
        core.add_request(make_request("free", [7], greedy(max_tokens=12)))
        answers.append(run_with_checks(core))
    check_equal(*answers)
    assert max(counts) > 1
    stages.shutdown()


def run_with_checks(core: EngineCore) -> dict[str, Answer]:
    answers: dict[int, dict[str, Answer]] = {}
    while not core.is_idle():
        if not core.has_work():
            core.wait()
        run(core, answers)
    return answers[0]


def test_kv_events_and_a_pause_with_steps_in_flight(tiny, tmp_path) -> None:
    """A subscriber knows what the pool has; a pause changes no token."""
    model = tiny("qwen2")
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("live", "replay")]
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoints[0], replay_endpoint=endpoints[1]
    )
    few = {"num_gpu_blocks_override": 24}  # blocks are taken from the cache again
    stages = RankThreads.of(model, 1, 2, kv_events_config=config, **few)
    requests = [
        make_request(f"r{i}", [1 + i % 3] * 40, greedy(max_tokens=20, temperature=0.7, seed=i))
        for i in range(6)
    ]
    core = EngineCore(stages.config, stages)
    core.scheduler.limits.least_samples = 1
    answers: dict[str, Answer] = {}
    with closing(Subscriber(*endpoints)) as subscriber:
        for request in requests:
            core.add_request(request)
        for _ in range(7):
            for outputs in step(core).values():
                collect(outputs, answers)
        assert core.has_step_in_flight
        paused = core.call_utility("pause", ["keep"])
        assert not core.has_step_in_flight
        for outputs in step(core).values():  # what the drained steps owe
            collect(outputs, answers)
        assert paused.result(0) is None and not core.has_work()
        num_tokens = {name: len(answer.tokens) for name, answer in answers.items()}
        assert step(core) == {} and min(num_tokens.values()) > 0
        core.call_utility("resume", [])
        run(core, {0: answers})
        assert {len(answer.tokens) for answer in answers.values()} == {20}
        subscriber.read_until(core.kv_events._next_number - 1)
        assert subscriber.known == cached_in(core) and subscriber.num_checked > 10
    core.shutdown()
    one = start_executor(model)
    alone = EngineCore(one.config, one)
    for request in requests:
        alone.add_request(request)
    check_equal(run(alone)[0], answers)
