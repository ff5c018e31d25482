"""Several rounds of drafts and verification in one call give what single passes give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from quire import LLM, SamplingParams
from quire.executor.runner.speculation.draft_rounds import DraftRounds
from quire.kernels.cpu.native.library import library
from quire.tests.bundled_model.heads import trained

pytestmark = pytest.mark.skipif(library is None, reason="native kernels are not built here")

MESSAGES = [
    [{"role": "user", "content": text}]
    for text in ("Who are you?", "Tell me a story about a river and a fox. " * 3, "Hello! Hi!")
]


def make_llm(method: str, **settings: Any) -> LLM:
    """With a trained head or draft model, whose drafts are right most times."""
    config = {"method": method, "model": trained(method), "num_speculative_tokens": 4}
    return LLM(
        engine="inproc",
        enable_prefix_caching=False,
        speculative_config=config | {"adaptive": False},
        **settings,
    )


@pytest.fixture(scope="module", params=["draft_model", "eagle3", "mtp"])
def llm(request: Any) -> Iterator[LLM]:
    with make_llm(request.param, dtype="bfloat16") as llm:
        yield llm


def drafter_of(llm: LLM) -> Any:
    return llm.llm_engine.client._engine.core.executor.worker.runner.speculation.drafter


def answers(llm: LLM, messages: list[Any], **params: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens, and how many drafts were made and accepted."""
    names = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    before = llm.get_metrics()
    outputs = llm.chat(messages, SamplingParams(seed=7, **params), use_tqdm=False)
    after = llm.get_metrics()
    return (
        [output.outputs[0].token_ids for output in outputs],
        [after[name] - before[name] for name in names],
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_and_drafts_are_those_of_single_passes(llm, monkeypatch, batch, temperature):
    counts: list[int] = []
    run = DraftRounds.run

    def watched(self: Any, step: Any, num_drafts: int, num_rounds: int) -> Any:
        counts.append(num_rounds)
        return run(self, step, num_drafts, num_rounds)

    monkeypatch.setattr(DraftRounds, "run", watched)
    params = {"temperature": temperature, "max_tokens": 90, "top_k": 40, "ignore_eos": True}
    found = answers(llm, MESSAGES[:batch], **params)
    assert max(counts) > 2 and sum(counts) > 5
    monkeypatch.setattr(drafter_of(llm), "rounds", None)
    assert answers(llm, MESSAGES[:batch], **params) == found
    assert found[1][2] > found[1][0]  # more than one draft of each is right


def test_rows_that_need_the_host_take_single_passes(llm, monkeypatch):
    monkeypatch.setattr(DraftRounds, "run", None)  # a call would raise
    for params in ({"logprobs": 1}, {"presence_penalty": 0.5}, {"logit_bias": {"5": 1.0}}):
        (tokens,), _ = answers(llm, MESSAGES[:1], temperature=0.0, max_tokens=24, **params)
        assert tokens


def test_logits_that_are_not_finite_end_their_own_row(llm, monkeypatch):
    """In the second round, those after the first answer's last accepted draft."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    rounds, call, given = drafter_of(llm).rounds, drafter_of(llm).rounds._drafting, []

    def spoiled(*arguments: Any) -> Any:
        tokens, is_finite, accepted = call(*arguments)
        if not given:
            is_finite[1, 0, accepted[1, 0]] = False
            given.extend(1 + accepted)
        return tokens, is_finite, accepted

    def completions() -> list[Any]:
        return [output.outputs[0] for output in llm.chat(MESSAGES[::2], params, use_tqdm=False)]

    first, second = completions()
    spoiled.fits = rounds._drafting.fits
    monkeypatch.setattr(rounds, "_drafting", spoiled)
    failed, other = completions()
    # that of the prompt, those of two rounds, less the one that failed
    num_tokens = 1 + int(given[0][0]) + int(given[1][0]) - 1
    assert (failed.token_ids, failed.finish_reason) == (first.token_ids[:num_tokens], "error")
    assert (other.token_ids, other.finish_reason) == (second.token_ids, "length")
