"""The bundled model's long-recall answers stay right however the engine computes the prompt."""

from __future__ import annotations

import random

import pytest
from quire import LLM, SamplingParams
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.bundled_model.data import recall_prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
NUM_TOKENS_BETWEEN = 1500


def samples(count: int, seed: int = 8) -> list:
    rng = random.Random(seed)
    return [recall_prompt(rng, NUM_TOKENS_BETWEEN) for _ in range(count)]


def num_right(llm: LLM, asked: list) -> int:
    outputs = llm.generate([sample.prompt for sample in asked], GREEDY, use_tqdm=False)
    assert all(len(output.prompt_token_ids) > NUM_TOKENS_BETWEEN for output in outputs)
    return sum(
        sample.answer in output.outputs[0].text
        for sample, output in zip(asked, outputs, strict=True)
    )


@pytest.mark.slow
def test_in_chunks_of_16():
    with LLM(engine="inproc", max_num_batched_tokens=16) as llm:
        assert num_right(llm, samples(4)) >= 4


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_under_preemption(mode):
    """The two prompts just fit, but not their answers: one request is preempted in the middle of
    its answer.
    """
    asked = samples(6)
    tokenizer = Tokenizer(find_model_directory("bundled"))
    num_blocks = 1 + sum(-(-len(tokenizer.encode(sample.prompt)) // 16) for sample in asked[:2])
    with LLM(
        engine="inproc",
        max_model_len=2048,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=512,
        preemption_mode=mode,
    ) as llm:
        assert num_right(llm, asked) >= 6
        metrics = llm.get_metrics()
        assert metrics["num_preemptions"] >= 1
        assert (
            metrics["num_recomputed_tokens" if mode == "recompute" else "num_blocks_swapped_in"]
            >= 1
        )


@pytest.mark.slow
def test_with_a_warm_prefix_cache():
    asked = samples(6)
    with LLM(engine="inproc") as llm:
        cold = num_right(llm, asked)
        outputs = llm.generate([sample.prompt for sample in asked], GREEDY, use_tqdm=False)
        assert all(output.num_cached_tokens > NUM_TOKENS_BETWEEN - 16 for output in outputs)
        assert (
            sum(
                sample.answer in output.outputs[0].text
                for sample, output in zip(asked, outputs, strict=True)
            )
            == cold
            >= 6
        )


@pytest.mark.parametrize(
    ("engine", "number"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in (("inproc", 24), ("process", 64))],
)
def test_many_requests_at_once(engine, number):
    with LLM(engine=engine, max_num_seqs=64) as llm:
        assert num_right(llm, samples(number)) >= 0.95 * number
