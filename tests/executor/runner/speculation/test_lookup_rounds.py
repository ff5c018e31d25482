"""Several rounds of prompt lookup and verification in one call give what single passes give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from quire import LLM, SamplingParams
from quire.executor.runner.speculation import drafters
from quire.executor.runner.speculation.lookup_rounds import LookupRounds
from quire.kernels.cpu.native.library import library

pytestmark = pytest.mark.skipif(library is None, reason="native kernels are not built here")

STORY = "Once upon a time, there was a little dog. The dog liked to play. "
TEXTS = [STORY * 3, "1, 2, 3, 4, 1, 2, 3, 4, 1, 2", "Tell me something new about the sea and"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}
    with LLM(
        engine="inproc",
        dtype="bfloat16",
        enable_prefix_caching=False,
        speculative_config=config | {"adaptive": False},
    ) as llm:
        yield llm


def answers(llm: LLM, texts: list[str], **params: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens, and how many drafts were made and accepted."""
    names = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    before = llm.get_metrics()
    sampling = [SamplingParams(seed=7 + row, **params) for row in range(len(texts))]
    outputs = llm.generate(texts, sampling, use_tqdm=False)
    after = llm.get_metrics()
    return (
        [output.outputs[0].token_ids for output in outputs],
        [after[name] - before[name] for name in names],
    )


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50}], ids=str
)
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_those_of_single_passes(llm, monkeypatch, batch, params):
    counts: list[int] = []
    run = LookupRounds.run

    def watched(self: Any, step: Any, most: list[int], num_rounds: int) -> Any:
        counts.append(num_rounds)
        return run(self, step, most, num_rounds)

    monkeypatch.setattr(LookupRounds, "run", watched)
    params = {"temperature": 0.0, "max_tokens": 90, "ignore_eos": True} | params
    found, (num_drafts, num_drafted, num_accepted) = answers(llm, TEXTS[:batch], **params)
    assert max(counts) > 2 and sum(counts) > 5
    assert num_drafts > 5 and num_drafted > 2 * num_drafts and num_accepted > 0
    monkeypatch.setattr(LookupRounds, "count", lambda *_: 0)
    # without rounds, some passes after a miss do not look for drafts
    assert answers(llm, TEXTS[:batch], **params)[0] == found


def test_rows_that_need_the_host_take_single_passes(llm, monkeypatch):
    monkeypatch.setattr(LookupRounds, "run", None)  # a call would raise
    for params in ({"logprobs": 1}, {"presence_penalty": 0.5}, {"logit_bias": {"5": 1.0}}):
        (tokens,), _ = answers(llm, TEXTS[:1], temperature=0.0, max_tokens=24, **params)
        assert tokens


def test_a_model_that_is_recorded_again_gets_new_rounds(llm):
    (before,), _ = answers(llm, TEXTS[:1], temperature=0.0, max_tokens=60, ignore_eos=True)
    llm.sleep(level=1)
    llm.wake_up()
    (after,), drafts = answers(llm, TEXTS[:1], temperature=0.0, max_tokens=60, ignore_eos=True)
    assert after == before and drafts[0] > 3


@pytest.mark.parametrize("method", ["suffix", "auto"])
def test_other_lookups_take_single_passes(method):
    config = {"method": method, "num_speculative_tokens": 4}
    with LLM(engine="inproc", speculative_config=config) as llm:
        answers(llm, TEXTS[:1], temperature=0.0, max_tokens=30)
        core = llm.llm_engine.client._engine.core
        drafter = core.executor.worker.runner.speculation.drafter
        assert isinstance(drafter, drafters.LookupDrafter) and drafter.rounds is None
