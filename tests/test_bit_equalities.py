"""In bfloat16 on native kernels, the bits of a request's tokens and log-probabilities do not depend
on the batch, on how the prompt is computed, or on speculation.

With speculation, `pytest` runs one method and number of threads with each setting, and `pytest -m
slow tests/test_bit_equalities.py` runs the rest.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import msgspec
import pytest
from quire import LLM, LLMEngine, RequestOutput, SamplingParams
from quire.kernels.cpu.native.library import library
from quire.tests.bundled_model.heads import trained
from quire.tests.client_forms import closing, make_engine
from quire.tests.feature_run import GGUF_FILE, GGUF_MODEL, gguf_folder
from quire.tests.workloads import Job, Result, assert_same, drive, random_jobs

pytestmark = pytest.mark.skipif(
    library is None, reason="native kernels are not built here; torch's do not promise this"
)

# One request of the longest kind fits; the others preempt each other all the time.
FEW = dict(block_size=8, max_model_len=256, num_gpu_blocks_override=34, num_scheduler_steps=1)
Logprobs = list[list[tuple[int, float]]]
TRAINED = ["draft_model", "eagle3", "mtp"]  # some of their drafts are right
METHODS = ["ngram", "suffix", *TRAINED]
# proposers and threads; the settings of all tests take turns with them
DRAFTING = [*zip(METHODS * 2, [1, 2, 1, 2, 1, 2, 1, 2, 1, 2])]


def with_drafts(settings: dict[str, Any], method: str | None) -> dict[str, Any]:
    """The settings with this proposer, whose drafts do not depend on measured times."""
    if method is None:
        return settings
    config = {"method": method, "prompt_lookup_min": 1, "adaptive": False}
    if method in TRAINED:
        config["model"] = trained(method)
    return settings | {"speculative_config": config}


def with_and_without_drafts(settings: list[dict[str, Any]], turn: int) -> list[Any]:
    """Each of `settings`, then with each of DRAFTING; all but one of these are slow tests: that
    whose turn it is, from `turn` on.
    """
    found: list[Any] = []
    for index, plain in enumerate(settings, start=turn):
        found.append(plain)
        for i, (method, num_threads) in enumerate(DRAFTING):
            marks = [] if i == index % len(DRAFTING) else [pytest.mark.slow]
            drafting = with_drafts(plain | {"num_threads": num_threads}, method)
            found.append(pytest.param(drafting, marks=marks))
    return found


def name_of(settings: dict[str, Any]) -> str:
    return ",".join(
        f"{key}={value['method'] if isinstance(value, dict) else value}"
        for key, value in settings.items()
    )


def assert_drafts(engine: LLMEngine, settings: dict[str, Any]) -> None:
    """Without drafts, or if none is ever right, the tests with speculation would prove nothing."""
    metrics = engine.call_utility("get_metrics")
    drafted, accepted = metrics["num_draft_tokens"], metrics["num_accepted_tokens"]
    method = settings.get("speculative_config", {}).get("method")
    assert (drafted > accepted > 0) == (method is not None)


def crowded(jobs: list[Job], settings: dict[str, Any]) -> list[Job]:
    """An engine that drafts takes fewer steps, so requests arrive within fewer, or they would not
    meet each other.
    """
    divisor = 8 if settings.get("speculative_config", {}).get("model") else 1
    return [replace(job, arrives_at_step=job.arrives_at_step // divisor) for job in jobs]


def assert_preempts(engine: LLMEngine, settings: dict[str, Any]) -> None:
    """For a few jobs. Where a model drafts, they may end before they need each other's blocks."""
    if "model" not in settings.get("speculative_config", {}):
        assert engine.call_utility("get_metrics")["num_preemptions"] > 0


def make_jobs(count: int, seed: int) -> list[Job]:
    """Half of the jobs request log-probabilities, some also those of the prompt. They are compared
    as exact bits.
    """
    rng = random.Random(seed)
    jobs = []
    for job in random_jobs(count, vocab_size=1500, seed=seed, max_prompt=206, max_output=48):
        params = msgspec.structs.replace(
            job.params,
            logprobs=rng.choice([None, 1, 5]),
            prompt_logprobs=rng.choice([None] * 5 + [2]),
            ignore_eos=True,  # most texts of random tokens would end at once
        )
        jobs.append(replace(job, params=params))
    return jobs


def table(positions: Any) -> Logprobs:
    """Return the tokens and log-probabilities of each position. The floats compare equal only if
    all bits are equal.
    """
    return [
        [(token, entry.logprob) for token, entry in position.items()] if position else []
        for position in positions or []
    ]


def run(
    engine: LLMEngine, jobs: list[Job], aborts: bool = True
) -> tuple[dict[str, Result], dict[str, tuple[Logprobs, Logprobs]]]:
    logprobs: dict[str, tuple[Logprobs, Logprobs]] = {}

    def watch(step: int, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            logprobs[output.request_id] = (
                table(output.prompt_logprobs),
                table(output.outputs[0].logprobs),
            )

    return drive(engine, jobs, aborts=aborts, check=False, watch=watch), logprobs


def assert_same_bits(
    jobs: list[Job], got: tuple[dict, dict], expected: tuple[dict, dict], aborts: bool = True
) -> None:
    assert_same(jobs, got[0], expected[0], aborts)
    for job in jobs:
        if not aborts or job.abort_after is None:
            assert got[1][job.request_id] == expected[1][job.request_id], job


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return make_jobs(40, seed=11)


@pytest.fixture(scope="module")
def expected(jobs):
    """Run each request alone: its prompt in one piece, on one thread, with an empty cache."""
    with closing(
        make_engine(dtype="bfloat16", enable_prefix_caching=False, max_num_seqs=1)
    ) as engine:
        return run(engine, jobs, aborts=False)


SETTINGS = [
    dict(num_threads=1),
    dict(num_threads=2),
    dict(num_threads=2, max_num_batched_tokens=37),
    dict(**FEW, preemption_mode="recompute", enable_prefix_caching=False, num_threads=2),
    dict(**FEW, preemption_mode="swap", max_num_batched_tokens=64, async_scheduling=True),
    dict(num_scheduler_steps=4, max_num_seqs=5, long_prefill_token_threshold=19, num_threads=2),
]


@pytest.mark.sampled(step=6)
@pytest.mark.parametrize("settings", with_and_without_drafts(SETTINGS, 0), ids=name_of)
def test_batching_and_scheduling_do_not_change_a_bit(jobs, expected, settings):
    with closing(make_engine(dtype="bfloat16", **settings)) as engine:
        assert_same_bits(jobs, run(engine, crowded(jobs, settings)), expected)
        assert_drafts(engine, settings)
        if settings.items() >= FEW.items():
            # Otherwise the test would prove nothing. The tokens, and so the number, depend on
            # whether the processor multiplies bfloat16.
            assert engine.client.call_utility("get_metrics")["num_preemptions"] >= 2


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    "settings",
    [
        dict(num_threads=2),
        with_drafts(dict(num_threads=2), "suffix"),
        *(
            pytest.param(with_drafts(dict(num_threads=count), method), marks=pytest.mark.slow)
            for method, count in DRAFTING
            if (method, count) != ("suffix", 2)
        ),
    ],
    ids=name_of,
)
def test_a_warm_cache_or_another_process_does_not_change_a_bit(jobs, expected, settings):
    """All of these processes give what another one gives."""
    with closing(make_engine("process", dtype="bfloat16", **settings)) as engine:
        assert_same_bits(jobs, run(engine, jobs, aborts=False), expected, aborts=False)
        cold = engine.get_metrics()
        warm = run(engine, jobs, aborts=False)
        assert_same_bits(jobs, warm, expected, aborts=False)
        assert sum(result.num_cached_tokens or 0 for result in warm[0].values()) > 0.4 * sum(
            len(job.prompt_token_ids) for job in jobs
        )
        assert_drafts(engine, settings)
        if "suffix" in str(settings):  # it has seen the answers
            num_accepted = engine.get_metrics()["num_accepted_tokens"] - cold["num_accepted_tokens"]
            assert num_accepted > 0.3 * sum(len(result.token_ids) for result in warm[0].values())


def random_settings(rng: random.Random) -> dict[str, Any]:
    settings = dict(
        num_threads=rng.choice([1, 2, 3]),
        max_num_seqs=rng.choice([1, 2, 7, 32]),
        max_num_batched_tokens=rng.choice([32, 33, 100, 2048]),
        enable_prefix_caching=rng.random() < 0.5,
        async_scheduling=rng.random() < 0.3,
        num_scheduler_steps=rng.choice([0, 1, 3]),
    )
    settings = with_drafts(settings, rng.choice([None, None, *METHODS, "auto"]))
    if rng.random() < 0.5:
        settings |= dict(
            num_gpu_blocks_override=rng.choice([34, 60]),
            max_model_len=256,
            block_size=8,
            preemption_mode=rng.choice(["recompute", "swap"]),
        )
    else:
        settings |= dict(block_size=rng.choice([8, 16, 32]))
    return settings


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_settings_and_neighbours_do_not_change_a_bit():
    """Run with `pytest -m slow tests/test_bit_equalities.py`: forty engines with random settings,
    each with the other requests in a random order.
    """
    rng = random.Random(5)
    jobs = make_jobs(150, seed=12)
    with closing(
        make_engine(dtype="bfloat16", enable_prefix_caching=False, max_num_seqs=1)
    ) as engine:
        expected = run(engine, jobs, aborts=False)
    for _ in range(40):
        settings = random_settings(rng)
        some = [
            replace(job, arrives_at_step=rng.randrange(60))
            for job in rng.sample(jobs, rng.randint(1, 60))
        ]
        with closing(make_engine(dtype="bfloat16", **settings)) as engine:
            try:
                assert_same_bits(some, run(engine, some), expected)
            except AssertionError as error:
                raise AssertionError(f"with {settings}") from error


def resolved(small: dict[str, Any]) -> dict[str, Any]:
    is_gguf = small.get("model") == GGUF_MODEL
    return small | {"model": f"{gguf_folder().name}/{GGUF_FILE}"} if is_gguf else small


@pytest.fixture(scope="module")
def few() -> list[Job]:
    jobs = make_jobs(20, seed=12)
    return [replace(job, arrives_at_step=job.arrives_at_step // 16) for job in jobs]


@pytest.fixture(scope="module")
def few_alone(few):
    """Return what each of `few` gives alone, with such weights or such a cache."""

    @cache
    def alone(**small: Any) -> tuple[dict, dict]:
        with closing(
            make_engine(
                dtype="bfloat16", **resolved(small), enable_prefix_caching=False, max_num_seqs=1
            )
        ) as engine:
            return run(engine, few, aborts=False)

    return alone


SMALL = [
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"kv_cache_dtype": "int8"},
    {"model": GGUF_MODEL},
]
DISTURBED = dict(**FEW, num_threads=2, max_num_batched_tokens=37, preemption_mode="swap")


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    "settings", with_and_without_drafts([s | DISTURBED for s in SMALL], 6), ids=name_of
)
def test_quantized_weights_and_caches(few, few_alone, settings):
    small = {key: value for key, value in settings.items() if key in [*chain(*SMALL)]}
    with closing(make_engine(dtype="bfloat16", **resolved(settings))) as engine:
        got = run(engine, crowded(few, settings), aborts=False)
        assert_same_bits(few, got, few_alone(**small), aborts=False)
        assert_drafts(engine, settings)
        assert_preempts(engine, settings)


# ------------------------------------------------------------ windows that return blocks

LAYER_TYPES = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
WINDOWS = dict(
    dtype="bfloat16",
    hf_overrides={"use_sliding_window": True, "sliding_window": 21, "layer_types": LAYER_TYPES},
)
# three groups of two layers; one sequence fits, see KVLayout.most_blocks
FEW_OF_GROUPS = dict(block_size=8, max_model_len=256, num_scheduler_steps=1)


@pytest.fixture(scope="module")
def jobs_with_windows(jobs) -> list[Job]:
    return [replace(job, arrives_at_step=job.arrives_at_step // 8) for job in jobs]


@pytest.fixture(scope="module")
def kept_whole(jobs_with_windows):
    """Run each request alone, with windows that keep the whole context."""
    settings = dict(disable_hybrid_kv_cache_manager=True, enable_prefix_caching=False)
    with closing(make_engine(**WINDOWS, **settings, max_num_seqs=1)) as engine:
        return run(engine, jobs_with_windows, aborts=False)


SETTINGS_WITH_WINDOWS = [
    dict(num_threads=2),
    dict(
        **FEW_OF_GROUPS,
        num_gpu_blocks_override=97,
        preemption_mode="recompute",
        enable_prefix_caching=False,
    ),
    dict(
        **FEW_OF_GROUPS,
        num_gpu_blocks_override=80,
        preemption_mode="swap",
        max_num_batched_tokens=64,
        async_scheduling=True,
    ),
    dict(num_scheduler_steps=4, max_num_seqs=5, long_prefill_token_threshold=19),
]


@pytest.mark.sampled(step=6)
@pytest.mark.parametrize("settings", with_and_without_drafts(SETTINGS_WITH_WINDOWS, 0), ids=name_of)
def test_returned_blocks_do_not_change_a_bit(jobs_with_windows, kept_whole, settings):
    with closing(make_engine(**WINDOWS, **settings)) as engine:
        assert engine.client._engine.core.executor.kv_cache_windows == (0, 21, 21)
        got = run(engine, crowded(jobs_with_windows, settings))
        assert_same_bits(jobs_with_windows, got, kept_whole)
        assert_drafts(engine, settings)
        if settings.items() >= FEW_OF_GROUPS.items():
            assert_preempts(engine, settings)
        else:
            assert engine.client.call_utility("get_metrics")["prefix_cache_hits"] > 0


def test_completions_of_one_prompt_share_the_blocks_of_all_groups():
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    answers = []
    for whole, method in ((True, None), (False, None), (False, "suffix")):
        settings = with_drafts(WINDOWS | dict(disable_hybrid_kv_cache_manager=whole), method)
        with LLM("bundled", engine="inproc", **settings, max_model_len=256) as llm:
            for _ in range(2):  # the second time, the answers were seen before
                outputs = llm.generate([{"prompt_token_ids": list(range(20, 93))}], params, False)
                answers.append([completion.token_ids for completion in outputs[0].outputs])
            metrics = llm.get_metrics()
            assert metrics["num_blocks_copied"] == (
                4 if whole else 12
            )  # 72 = 4.5 blocks, for two siblings
            assert (metrics["num_accepted_tokens"] > 40) == (method is not None)
    assert all(answer == answers[0] for answer in answers) and len({*map(tuple, answers[0])}) == 3
