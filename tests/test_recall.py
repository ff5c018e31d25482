"""The bundled model's long-recall answers stay right whatever the engine does with the prompt.
May know: the public LLM, the generator of recall prompts.
Must not know: how chunks, preemption or the prefix cache work."""

from __future__ import annotations

import random

import pytest
from quire import LLM, SamplingParams
from quire.tests.bundled_model.data import recall_prompt

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
NUM_TOKENS_BETWEEN = 1500


def samples(count: int, seed: int = 7) -> list:
    rng = random.Random(seed)
    return [recall_prompt(rng, NUM_TOKENS_BETWEEN) for _ in range(count)]


def num_right(llm: LLM, asked: list) -> int:
    outputs = llm.generate([sample.prompt for sample in asked], GREEDY, use_tqdm=False)
    assert all(len(output.prompt_token_ids) > NUM_TOKENS_BETWEEN for output in outputs)
    return sum(sample.answer in output.outputs[0].text for sample, output in zip(asked, outputs, strict=True))


def test_in_chunks_of_16():
    with LLM(engine="inproc", max_num_batched_tokens=16) as llm:
        assert num_right(llm, samples(4)) >= 4


def test_under_preemption():
    with LLM(engine="inproc", num_gpu_blocks_override=260, max_num_batched_tokens=512) as llm:  # two of these prompts fit, six run
        assert num_right(llm, samples(6)) >= 6
        assert llm.llm_engine.client.call_utility("get_metrics")["num_preemptions"] >= 1


def test_with_a_warm_prefix_cache():
    asked = samples(6)
    with LLM(engine="inproc") as llm:
        cold = num_right(llm, asked)
        outputs = llm.generate([sample.prompt for sample in asked], GREEDY, use_tqdm=False)
        assert all(output.num_cached_tokens > NUM_TOKENS_BETWEEN - 16 for output in outputs)
        assert sum(sample.answer in output.outputs[0].text for sample, output in zip(asked, outputs, strict=True)) == cold >= 6


@pytest.mark.parametrize("engine", ["inproc", "process"])
def test_64_requests_at_once(engine):
    with LLM(engine=engine, max_num_seqs=64) as llm:
        assert num_right(llm, samples(64)) >= 61  # 95 %
