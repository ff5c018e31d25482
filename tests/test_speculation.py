"""Speculation changes no bit: tokens, log-probabilities and ends are those of an engine without it,
whatever is drafted.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from quire import LLM, LLMEngine, SamplingParams
from quire.executor.runner.speculation.drafters import LookupDrafter
from quire.frontend import bundled_model
from quire.ipc.errors import InvalidParameterError
from quire.ipc.json_files import read_json
from quire.ipc.params import StructuredOutputsParams
from quire.tests.bundled_model import heads
from quire.tests.client_forms import closing, engine_args, make_engine
from quire.tests.feature_loras import EngineByNumber, adapter
from quire.tests.test_bit_equalities import FEW, assert_same_bits, make_jobs, run
from quire.tests.workloads import Job
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

BUNDLED = Path(bundled_model.__file__).parent

# adaptive drafting depends on measured times
NGRAM = {"num_speculative_tokens": 7, "prompt_lookup_min": 1, "adaptive": False}
SCHEMA = {"type": "array", "items": {"enum": ["a", "bb", 17]}, "maxItems": 9}
STRUCTURE = StructuredOutputsParams(json=SCHEMA)


class Knowing:
    """A proposer that knows the answers, and drafts them with some errors."""

    def __init__(self, answers: list[list[int]], seed: int = 0, right: float = 0.8):
        self._rng, self._right = random.Random(seed), right
        # what follows the first tokens
        self._texts = answers

    def remember(self, output: np.ndarray, salt: Hashable) -> None:
        pass

    def propose(self, token_ids: np.ndarray, num_tokens: int, salt: Hashable) -> np.ndarray:
        known = token_ids.tolist()
        for text in self._texts:
            if text[: len(known)] == known and len(text) > len(known):
                draft = text[len(known) : len(known) + self._rng.randint(1, num_tokens)]
                break
        else:
            draft = [self._rng.randrange(1500) for _ in range(num_tokens)]
        return np.array(
            [t if self._rng.random() < self._right else self._rng.randrange(1500) for t in draft],
            np.int32,
        )


def let_know(engine: LLMEngine, jobs: list[Job], expected: Any) -> None:
    """The engine's proposer knows the answers."""
    runner = engine.client._engine.core.executor.runner
    texts = [[*job.prompt_token_ids, *expected[0][job.request_id].token_ids] for job in jobs]
    runner.speculation.drafter = LookupDrafter(Knowing(texts), runner.batch)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    jobs = make_jobs(40, seed=21)
    structured = {
        job.request_id: msgspec.structs.replace(
            job.params, structured_outputs=STRUCTURE, ignore_eos=False, max_tokens=40
        )
        for job in jobs[::5]
    }
    return [replace(job, params=structured.get(job.request_id, job.params)) for job in jobs]


@pytest.fixture(scope="module")
def expected(jobs):
    """Each request alone, without speculation."""
    with closing(
        make_engine(dtype="bfloat16", enable_prefix_caching=False, max_num_seqs=1)
    ) as engine:
        return run(engine, jobs, aborts=False)


SETTINGS = [
    dict(num_threads=1),
    dict(num_threads=2, max_num_batched_tokens=37, enable_jump_forward=False),
    dict(**FEW, preemption_mode="recompute", enable_prefix_caching=False),
    dict(**FEW, preemption_mode="swap", max_num_batched_tokens=64, num_threads=2),
    dict(async_scheduling=True, max_num_seqs=7),
]


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: ",".join(map(str, s)))
def test_speculation_changes_no_bit(jobs, expected, settings):
    settings = settings | {"num_scheduler_steps": 0, "speculative_config": NGRAM}
    with closing(make_engine(dtype="bfloat16", **settings)) as engine:
        let_know(engine, jobs, expected)
        assert_same_bits(jobs, run(engine, jobs), expected)
        engine.call_utility("check_integrity")
        metrics = engine.get_metrics()
        per_pos = engine.call_utility("status")["accepted_per_pos"]
        assert sum(per_pos) == metrics["num_accepted_tokens"]
        assert per_pos == sorted(per_pos, reverse=True) and per_pos[0] <= metrics["num_drafts"]
        assert metrics["num_accepted_tokens"] > 100
        assert metrics["num_draft_tokens"] > metrics["num_accepted_tokens"] + 100
        if settings.items() >= FEW.items():
            assert metrics["num_preemptions"] > 5


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_several_scheduler_steps_are_as_many_passes(jobs, expected, async_scheduling):
    """Also where the engine would choose one by itself."""
    config = {"method": "mtp", "model": heads.trained("mtp")}
    config |= {"num_speculative_tokens": 2, "adaptive": False}
    settings = {"num_scheduler_steps": 3, "async_scheduling": async_scheduling}
    with closing(make_engine(dtype="bfloat16", speculative_config=config, **settings)) as engine:
        assert_same_bits(jobs, run(engine, jobs), expected)
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        text = "Once upon a time, there was a little dog. The dog liked to play. " * 3
        engine.add_request("r", text, params)
        num_tokens = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                num_tokens.append(len(output.outputs[0].token_ids))
        assert max(np.diff(num_tokens)) > 3  # one pass gives at most that many
        engine.call_utility("check_integrity")
        assert engine.get_metrics()["num_accepted_tokens"] > 10


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("ngram", marks=pytest.mark.slow),
        pytest.param("suffix", marks=pytest.mark.slow),
        "auto",
    ],
)
def test_lookups_change_no_bit_and_are_accepted(jobs, expected, method):
    config = NGRAM | {"method": method}
    with closing(make_engine(dtype="bfloat16", speculative_config=config)) as engine:
        assert_same_bits(jobs, run(engine, jobs), expected)
        text = "Once upon a time, there was a little dog. The dog liked to play. " * 3
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        engine.add_request("r", text, params)
        num_steps = 0
        while engine.has_unfinished_requests():
            engine.step()
            num_steps += 1
        assert num_steps < 12  # each takes several passes, with drafts or without
        metrics = engine.get_metrics()
        assert metrics["num_accepted_tokens"] > 20
        assert metrics["num_accepted_tokens"] <= metrics["num_draft_tokens"]


def draft_model(directory: Path, **changes: Any) -> Path:
    """A model of random weights with the vocabulary of the bundled one."""
    config = read_json(BUNDLED / "config.json") | changes
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    shutil.copy(BUNDLED / "tokenizer.json", directory)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    model.save_pretrained(directory)
    return directory


DRAFT_SETTINGS = [
    dict(num_threads=1),
    dict(num_threads=2, max_num_batched_tokens=37, kernels={"sample_tokens": "reference"}),
    dict(**FEW, preemption_mode="recompute", enable_prefix_caching=False),
    dict(**FEW, preemption_mode="swap", max_num_batched_tokens=64, num_threads=2),
]


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("settings", DRAFT_SETTINGS, ids=lambda s: ",".join(map(str, s)))
def test_a_draft_model_changes_no_bit(jobs, expected, settings):
    """The model itself as its draft model: all drafts of rows without stages are right, also after
    preemption and swap, at every temperature.
    """
    config = {"method": "draft_model", "model": "bundled", "num_speculative_tokens": 5}
    settings = settings | {"speculative_config": config | {"adaptive": False}}
    with closing(make_engine(dtype="bfloat16", **settings)) as engine:
        assert_same_bits(jobs, run(engine, jobs), expected)
        engine.call_utility("check_integrity")
        metrics = engine.get_metrics()
        assert metrics["num_draft_tokens"] > 100
        # some jobs have penalties, biases or grammars, which the draft model does not know
        assert metrics["num_accepted_tokens"] > 0.3 * metrics["num_draft_tokens"]
        if settings.items() >= FEW.items():
            assert metrics["num_preemptions"] > 5


@pytest.mark.slow
def test_a_bad_draft_model_changes_no_bit(jobs, expected, tmp_path):
    """It also has windows and a shorter context than the texts have."""
    changes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96)
    windows = dict(use_sliding_window=True, sliding_window=16, max_window_layers=0)
    directory = draft_model(tmp_path / "m", **changes, **windows, max_position_embeddings=128)
    config = {"method": "draft_model", "model": str(directory), "num_speculative_tokens": 3}
    config["adaptive"] = False
    with closing(make_engine(dtype="bfloat16", speculative_config=config)) as engine:
        assert_same_bits(jobs, run(engine, jobs), expected)
        assert engine.get_metrics()["num_draft_tokens"] > 100


HEAD_SETTINGS = [
    ("mtp", dict(num_threads=2, max_num_batched_tokens=37)),
    ("eagle3", dict(num_threads=1, kernels={"sample_tokens": "reference"})),
    ("eagle3", dict(**FEW, preemption_mode="swap", max_num_batched_tokens=64)),
    ("mtp", dict(**FEW, preemption_mode="recompute", quantization="int8")),
]


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize(("method", "settings"), HEAD_SETTINGS)
def test_a_head_changes_no_bit(method, settings, jobs, expected, tmp_path):
    """Random heads, whose drafts are accepted by chance only."""
    embedding = load_file(BUNDLED / "model.safetensors")["model.embed_tokens.weight"].float()
    config = read_json(BUNDLED / "config.json")
    heads.save(heads.random_head(method, config, embedding, [1, 2, 4]), tmp_path)
    drafting = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}
    kind = {"quantization": settings["quantization"]} if "quantization" in settings else {}
    if kind:
        with closing(make_engine(dtype="bfloat16", **kind)) as engine:
            expected = run(engine, jobs, aborts=False)
    settings = settings | {"speculative_config": drafting | {"adaptive": False}}
    with closing(make_engine(dtype="bfloat16", **settings)) as engine:
        assert_same_bits(jobs, run(engine, jobs), expected)
        engine.call_utility("check_integrity")
        assert engine.get_metrics()["num_draft_tokens"] > 100


TRAINED = ["draft_model", "eagle3", "mtp"]
METHODS = ["auto", "suffix", "ngram", *TRAINED]


@pytest.mark.parametrize("method", TRAINED)
def test_trained_drafters_are_right_most_times(method):
    """Those of tests/bundled_model, on the bundled model's chat turns."""
    drafting = {"method": method, "model": heads.trained(method), "num_speculative_tokens": 4}
    messages = [[{"role": "user", "content": text}] for text in ("Who are you?", "Hello! Hi!")]
    answers = []
    for config in (None, drafting | {"adaptive": False}):
        with LLM(engine="inproc", dtype="bfloat16", speculative_config=config) as llm:
            for temperature in (0.0, 0.8):
                params = SamplingParams(temperature=temperature, seed=7, max_tokens=48)
                outputs = llm.chat(messages, params, use_tqdm=False)
                answers.append([output.outputs[0].token_ids for output in outputs])
            metrics = llm.get_metrics()
    assert answers[:2] == answers[2:]
    assert metrics["num_accepted_tokens"] > 1.5 * metrics["num_drafts"] > 0


@pytest.mark.slow
def test_a_draft_model_sleeps_and_wakes():
    config = {"method": "draft_model", "model": "bundled", "adaptive": False}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(engine="inproc", dtype="bfloat16", speculative_config=config) as llm:

        def accepted() -> tuple[list[int], int]:
            before = llm.get_metrics()["num_accepted_tokens"]
            output = llm.generate(["One day, a cat"], params, use_tqdm=False)[0]
            return output.outputs[0].token_ids, llm.get_metrics()["num_accepted_tokens"] - before

        first = accepted()
        llm.sleep(level=1)
        llm.wake_up()
        assert accepted() == first and first[1] >= 18


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_5000_random_requests(count=5000):
    """Each proposer in turn beside a plain engine, with chunks, preemption and swap; each batch of
    jobs has its own seed.
    """
    plain = dict(dtype="bfloat16", enable_prefix_caching=False, num_threads=1)
    with closing(make_engine(**plain)) as engine:
        for seed, start in enumerate(range(0, count, 500)):
            jobs = make_jobs(min(500, count - start), seed=100 + seed)
            expected = run(engine, jobs, aborts=False)
            settings = SETTINGS[1 + seed % (len(SETTINGS) - 1)]
            method = METHODS[seed % len(METHODS)]
            config = NGRAM | {"method": method, "adaptive": bool(seed % 2)}
            if method in TRAINED:
                config["model"] = heads.trained(method)
            settings = settings | {"speculative_config": config}
            with closing(make_engine(dtype="bfloat16", **settings)) as other:
                assert_same_bits(jobs, run(other, jobs, aborts=False), expected)
                other.call_utility("check_integrity")
                assert other.get_metrics()["num_draft_tokens"] > 0


def test_earlier_outputs_are_drafts_for_requests_of_their_salt_alone():
    config = NGRAM | {"method": "suffix"}
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True)
    with closing(make_engine(dtype="bfloat16", speculative_config=config)) as engine:
        answers, accepted = [], []
        for number, salt in enumerate(["a", "a", "b", None]):
            before = engine.get_metrics()["num_accepted_tokens"]
            prompt = {"prompt_token_ids": list(range(40, 60)), "cache_salt": salt}
            engine.add_request(str(number), prompt, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        answers.append(output.outputs[0].token_ids)
            accepted.append(engine.get_metrics()["num_accepted_tokens"] - before)
    assert answers == answers[:1] * 4
    assert accepted[1] > accepted[0] + 20
    assert accepted[2] == accepted[3] == accepted[0]


@pytest.fixture(scope="module")
def few_jobs(jobs) -> list[Job]:
    return jobs[:24]


@pytest.fixture(scope="module")
def expected_with_adapters(few_jobs):
    """Each request alone with its adapter, without speculation."""
    settings = dict(enable_prefix_caching=False, max_num_seqs=1, enable_lora=True, max_cpu_loras=2)
    args = engine_args(dtype="bfloat16", **settings)
    with closing(EngineByNumber.from_engine_args(args, engine="inproc")) as engine:
        return run(engine, few_jobs, aborts=False)


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("known", dict(max_loras=2, num_threads=2)),
        ("known", dict(**FEW, preemption_mode="swap", max_loras=1, max_cpu_loras=2)),
        ("suffix", dict(max_loras=2, max_num_batched_tokens=37)),
    ],
    ids=str,
)
def test_drafts_and_adapters_in_one_batch(
    few_jobs, expected_with_adapters, expected, method, settings
):
    config = NGRAM | {"method": "ngram" if method == "known" else method}
    args = engine_args(dtype="bfloat16", enable_lora=True, speculative_config=config, **settings)
    with closing(EngineByNumber.from_engine_args(args, engine="inproc")) as engine:
        if method == "known":
            let_know(engine, few_jobs, expected_with_adapters)
        else:  # it sees the answers
            run(engine, few_jobs, aborts=False)
        assert_same_bits(few_jobs, run(engine, few_jobs), expected_with_adapters)
        engine.call_utility("check_integrity")
        metrics = engine.get_metrics()
        assert metrics["num_draft_tokens"] > metrics["num_accepted_tokens"] > 200
    tokens = [
        {job.request_id: of[0][job.request_id].token_ids for job in few_jobs}
        for of in (expected, expected_with_adapters)
    ]
    num_changed = sum(tokens[0][id] != tokens[1][id] for id in tokens[0])
    assert len(few_jobs) / 2 < num_changed <= 2 * len(few_jobs) / 3  # those with an adapter


def test_what_is_remembered_of_an_adapter_is_drafted_for_no_other():
    """Not even for the next load of its files."""
    config = NGRAM | {"method": "suffix"}
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True)
    loras = [adapter(1), adapter(1), adapter(2), None, adapter(1, load_inplace=True)]
    accepted = []
    settings = dict(enable_lora=True, max_loras=2, dtype="bfloat16")
    with closing(make_engine(speculative_config=config, **settings)) as engine:
        for lora in [*loras, None]:
            before = engine.get_metrics()["num_accepted_tokens"]
            engine.add_request("r", [*range(40, 60)], params, lora_request=lora)
            while engine.has_unfinished_requests():
                engine.step()
            accepted.append(engine.get_metrics()["num_accepted_tokens"] - before)
    first, again, other, base, reloaded, base_again = accepted
    assert max(first, other, base, reloaded) < 10 and min(again, base_again) > 25, accepted


def test_what_a_grammar_forbids_is_not_verified(jobs, expected):
    """Random drafts of rows with a grammar: none is verified that cannot be right."""
    structured = jobs[::5]
    settings = {"speculative_config": NGRAM, "enable_jump_forward": False}
    with closing(make_engine(dtype="bfloat16", **settings)) as engine:
        runner = engine.client._engine.core.executor.runner
        runner.speculation.drafter = LookupDrafter(Knowing([]), runner.batch)
        run(engine, structured, aborts=False)
        refused = engine.get_metrics()["num_draft_tokens"]
        let_know(engine, structured, expected)
        assert_same_bits(structured, run(engine, structured, aborts=False), expected, False)
        metrics = engine.get_metrics()
        # of random tokens hardly any is allowed, and one that is not ends the draft
        assert refused < 0.1 * (metrics["num_draft_tokens"] - refused)
        assert metrics["num_accepted_tokens"] > 50


def test_completions_beams_and_stops():
    text = "One day, one day, one day, one day"
    answers = []
    for config in (None, NGRAM):
        with LLM(engine="inproc", speculative_config=config, dtype="bfloat16") as llm:
            params = SamplingParams(
                n=3, temperature=0.6, seed=3, max_tokens=50, ignore_eos=True, logprobs=2
            )
            many = llm.generate([text], params, use_tqdm=False)[0]
            stopped = llm.generate(
                [text], SamplingParams(temperature=0.0, stop=["day"]), use_tqdm=False
            )[0]
            answers.append(
                [
                    [(c.token_ids, c.logprobs, c.finish_reason, c.text) for c in many.outputs],
                    [(c.text, c.finish_reason, c.stop_reason) for c in stopped.outputs],
                ]
            )
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"speculative_config": {"method": "eagle"}}, "speculative_config: "),
        ({"speculative_config": {"num_speculative_tokens": 0}}, "speculative_config: "),
        (
            {"speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 3}},
            "prompt_lookup_min",
        ),
        ({"speculative_config": {"method": "draft_model"}}, "needs a model"),
        ({"speculative_config": {"model": "bundled"}}, "model needs one of the methods"),
        ({"speculative_config": {"method": "draft_model", "model": "/none"}}, "model: "),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, words):
    with pytest.raises(InvalidParameterError, match=words):
        make_engine(**arguments)
