"""Prompt log-probabilities against transformers, for any chunks and pieces, and the memory that a
piece may take.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from quire.executor.sampling import prompt_logprobs
from quire.executor.sampling.prompt_logprobs import PromptScorer
from quire.executor.worker import Worker
from quire.tests.executor.driver import Driver, Row, generate, greedy, start_executor
from quire.tests.tiny_models import VOCAB_SIZE

PROMPTS = [random.Random(n).choices(range(256), k=n) for n in (1, 2, 17, 60)]


@pytest.fixture(scope="module")
def executor(tiny) -> Worker:
    return start_executor(tiny("qwen2"))


@torch.inference_mode()
def expected_logprobs(model: torch.nn.Module, prompt: list[int]) -> np.ndarray:
    """[len(prompt) - 1, vocab]: row i is the distribution of token i + 1."""
    return model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)[:-1].numpy()


def assert_scored(row: Row, expected: np.ndarray, k: int) -> None:
    assert row.error is None
    assert sorted(row.prompt_logprobs) == list(range(1, len(row.prompt)))
    for index, (ids, logprobs, rank) in row.prompt_logprobs.items():
        reference = expected[index - 1]
        assert ids[0] == row.prompt[index] and len(ids) == k + 1
        np.testing.assert_allclose(logprobs, reference[ids], atol=1e-4)
        np.testing.assert_allclose(logprobs[1:], np.sort(reference)[::-1][:k], atol=1e-4)
        # two logits may be closer than two orders of summation agree
        assert abs(rank - 1 - int((reference > reference[ids[0]]).sum())) <= 1


@pytest.mark.parametrize("chunk", [None, 1, 7, 16, 59])
@pytest.mark.parametrize("k", [0, 5])
def test_equal_to_transformers_in_any_chunks(chunk, k, executor, tiny, oracle):
    rows = generate(
        executor, PROMPTS, 3, greedy(prompt_logprobs=k), chunk=chunk and (lambda row: chunk)
    )
    for row in rows:
        assert_scored(row, expected_logprobs(oracle(tiny("qwen2")), row.prompt), k)
    assert [row.output for row in rows] == [row.output for row in generate(executor, PROMPTS, 3)]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_other_architectures(kind, tiny, oracle):
    for row in generate(start_executor(tiny(kind)), PROMPTS, 1, greedy(prompt_logprobs=2)):
        assert_scored(row, expected_logprobs(oracle(tiny(kind)), row.prompt), 2)


def test_the_whole_vocabulary(executor, tiny, oracle):
    (row,) = generate(executor, PROMPTS[2:3], 1, greedy(prompt_logprobs=-1, logprobs=-1))
    assert_scored(row, expected_logprobs(oracle(tiny("qwen2")), row.prompt), VOCAB_SIZE)
    ((ids, _, _),) = row.logprobs
    assert sorted(ids[1:].tolist()) == list(range(VOCAB_SIZE))


@pytest.mark.parametrize("piece", [1, 7, 59])
def test_pieces_change_nothing(piece, tiny, oracle, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 4 * VOCAB_SIZE * piece)
    for row in generate(start_executor(tiny("qwen2")), PROMPTS, 1, greedy(prompt_logprobs=3)):
        assert_scored(row, expected_logprobs(oracle(tiny("qwen2")), row.prompt), 3)


def test_a_piece_stays_within_its_bytes(executor):
    runner, sizes = executor.runner, []

    def compute_logits(hidden):
        sizes.append(len(hidden))
        return executor.model.compute_logits(hidden)

    scorer = PromptScorer(compute_logits, runner.ops, VOCAB_SIZE)
    runner.plain.special.prompt_scorer = scorer
    assert scorer.max_piece == 64 * 2**20 // (4 * VOCAB_SIZE)
    assert PromptScorer(compute_logits, runner.ops, 10**9).max_piece == 1
    scorer.max_piece = 8
    generate(executor, PROMPTS[3:], 1, greedy(prompt_logprobs=0))
    assert sizes == [8] * 7 + [3]


def test_only_requests_that_enable_them_are_scored(executor):
    driver = Driver(executor)
    asking, other = (
        driver.add("a", PROMPTS[2], greedy(prompt_logprobs=1)),
        driver.add("b", PROMPTS[3]),
    )
    result = driver.step({"b": 30, "a": 16})
    assert [
        (entry.slot, entry.first_index, entry.token_ids.shape) for entry in result.prompt_logprobs
    ] == [(asking.slot, 1, (16, 2))]
    # all prompt tokens are scored
    assert executor.runner.batch.prompt_logprobs_slots == set()
    result = driver.step({"b": 30, "a": 1})  # the last prompt token predicts the sampled token
    assert result.prompt_logprobs == [] and result.num_sampled == [1, 1]
    for row in (asking, other):
        driver.free(row)
    driver.step({})


def test_a_preempted_prompt_is_scored_again_with_equal_results(executor):
    driver = Driver(executor)
    row = driver.add("r", PROMPTS[3], greedy(prompt_logprobs=2))
    driver.run(4)
    before, row.prompt_logprobs = row.prompt_logprobs, {}
    driver.preempt(row)
    driver.run(6, chunk=lambda row: 25)
    # not the output, although it is computed with the prompt
    assert sorted(row.prompt_logprobs) == list(range(1, 60))
    for index, (ids, logprobs, rank) in row.prompt_logprobs.items():
        assert ids.tolist() == before[index][0].tolist() and rank == before[index][2]
        np.testing.assert_allclose(logprobs, before[index][1], atol=1e-5)
    driver.free(row)
    driver.step({})


def test_nan_in_a_prompt_fails_only_its_request_at_once(tiny, oracle):
    executor = start_executor(tiny("qwen2"))
    executor.model.embed_tokens.weight[311] = float("nan")
    driver = Driver(executor)
    bad = driver.add("bad", [1, 2, 3, 311, *PROMPTS[2]], greedy(prompt_logprobs=1))
    good = driver.add("good", PROMPTS[2], greedy(prompt_logprobs=1))
    result = driver.step({"bad": 10, "good": 17})
    assert list(result.errors) == [bad.slot] and result.errors[bad.slot].startswith(
        "the model's logits for this request's prompt"
    )
    assert result.num_sampled == [0, 1]
    assert_scored(good, expected_logprobs(oracle(tiny("qwen2")), good.prompt), 1)
