"""Beam search against transformers' generate(num_beams=...) on the real engine. The models are tiny
and some beams reach an end-of-sequence token.
"""

from __future__ import annotations

import asyncio
import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from quire import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    InvalidParameterError,
    RequestOutputKind,
    SamplingParams,
)
from quire.tests.tiny_models import EOS_TOKEN_ID, save_tiny_model
from transformers import AutoModelForCausalLM

HOLDER = TemporaryDirectory(prefix="quire-test-")
PROMPTS = [[5, 6, 7], [40], list(range(60, 110)), [200, 17, 3, 99, 250]]
ARGUMENTS = {"dtype": "float32", "max_model_len": 128, "max_logprobs": 40, "num_threads": 1}


@cache
def directory(kind: str) -> Path:
    return save_tiny_model(Path(HOLDER.name) / kind, kind, seed=3)


@cache
def oracle(kind: str):
    model = AutoModelForCausalLM.from_pretrained(directory(kind), dtype=torch.float32).eval()
    with torch.no_grad():
        # chosen so that some beams end early and some do not
        model.lm_head.weight[EOS_TOKEN_ID] *= 2
    model.save_pretrained(directory(kind))
    return model


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def kind(request) -> str:
    oracle(request.param)
    return request.param


@pytest.fixture(scope="module")
def llm(kind) -> LLM:
    with LLM(str(directory(kind)), engine="inproc", **ARGUMENTS) as made:
        yield made


def expected(
    kind: str, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """Return (output tokens, score) of transformers' beams, best first."""
    with torch.no_grad():
        result = oracle(kind).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=None if params.ignore_eos else EOS_TOKEN_ID,
            pad_token_id=300,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    found = []
    for tokens, score in zip(
        result.sequences.tolist(), result.sequences_scores.tolist(), strict=True
    ):
        output = tokens[len(prompt) :]
        if not params.ignore_eos and EOS_TOKEN_ID in output:
            output = output[: output.index(EOS_TOKEN_ID) + 1]
        found.append((output, score))
    return found


CASES = [
    BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        length_penalty=penalty,
        include_stop_str_in_output=True,
        early_stopping=early,
    )
    for width, max_tokens, penalty, early in [
        (2, 12, 1.0, False),
        (2, 1, 1.0, False),
        (2, 20, 1.0, False),
        (4, 20, 1.0, False),
        (4, 20, 0.0, False),
        (4, 20, 2.0, False),
        (4, 20, -1.0, False),
        (8, 15, 0.6, False),
        (4, 20, 1.0, True),
        (4, 20, 1.0, "never"),
        (3, 20, 0.0, "never"),
        (10, 5, 1.0, False),
    ]
]
CASES += [
    BeamSearchParams(beam_width=4, max_tokens=15, ignore_eos=True, include_stop_str_in_output=True)
]


@pytest.mark.sampled
@pytest.mark.parametrize("params", CASES, ids=str)
def test_beams_equal_those_of_transformers(kind, llm, params) -> None:
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        reference = expected(kind, prompt, params)
        assert [sequence.tokens for sequence in output.sequences] == [
            prompt + tokens for tokens, _ in reference
        ]
        assert [sequence.score for sequence in output.sequences] == pytest.approx(
            [score for _, score in reference], rel=1e-6, abs=1e-4
        )
        for sequence in output.sequences:
            tokens = sequence.tokens[len(prompt) :]
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
            own = [
                position[token].logprob
                for position, token in zip(sequence.logprobs, tokens, strict=True)
            ]
            assert math.fsum(own) == pytest.approx(sequence.cum_logprob, abs=1e-4)
            ended = not params.ignore_eos and tokens[-1] == EOS_TOKEN_ID
            assert (sequence.finish_reason, sequence.stop_reason) == (
                ("stop", EOS_TOKEN_ID) if ended else ("length", None)
            )
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.sampled(step=2)
def test_some_beams_end_early(kind) -> None:
    """Otherwise the comparison with transformers would not cover end-of-sequence tokens."""
    lengths = {
        len(tokens)
        for prompt in PROMPTS
        for params in CASES
        for tokens, _ in expected(kind, prompt, params)
        if params.max_tokens == 20
    }
    assert len(lengths) > 5 and 20 in lengths


def test_end_of_sequence_is_left_out_unless_requested(kind, llm) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=20)
    for prompt in PROMPTS:
        [output] = llm.beam_search({"prompt_token_ids": prompt}, params)
        for sequence, (tokens, score) in zip(
            output.sequences, expected(kind, prompt, params), strict=True
        ):
            assert sequence.tokens == prompt + [token for token in tokens if token != EOS_TOKEN_ID]
            assert sequence.score == pytest.approx(score, abs=1e-4) and len(
                sequence.logprobs
            ) == len(sequence.tokens) - len(prompt)


def test_one_beam_is_the_greedy_output(llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    for prompt in PROMPTS:
        [output] = llm.beam_search(
            {"prompt_token_ids": prompt},
            BeamSearchParams(beam_width=1, max_tokens=20, include_stop_str_in_output=True),
        )
        [greedy] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert [sequence.tokens for sequence in output.sequences] == [
            prompt + greedy.outputs[0].token_ids
        ]


def test_max_model_len_ends_the_beams(llm) -> None:
    prompt = [5] * 125
    [output] = llm.beam_search(
        {"prompt_token_ids": prompt}, BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    )
    assert [len(sequence.tokens) for sequence in output.sequences] == [128, 128]


def test_refusals(llm) -> None:
    with pytest.raises(
        InvalidParameterError,
        match=r"beam_width: must be at most 20, got 21: a step needs the 2 \* beam_width most",
    ):
        llm.beam_search("x", BeamSearchParams(beam_width=21, max_tokens=5))
    with pytest.raises(InvalidParameterError, match=r"prompt: .*in request 1 of 2"):
        llm.beam_search(["x", ""], BeamSearchParams(beam_width=2, max_tokens=5))
    with pytest.raises(
        InvalidParameterError, match="params: must be BeamSearchParams, got SamplingParams"
    ):
        llm.beam_search("x", SamplingParams())
    assert llm.beam_search([], BeamSearchParams(beam_width=2, max_tokens=5)) == []
    llm.llm_engine.add_request("mine", "abc", SamplingParams(max_tokens=5))
    with pytest.raises(RuntimeError, match="unfinished"):
        llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=5))
    llm.llm_engine.abort_all_requests()


def test_an_interrupted_search_leaves_no_requests(llm, monkeypatch) -> None:
    step, calls = llm.llm_engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search("abc", params)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.beam_search("abc", params)[0].sequences


def test_async_beams_do_not_depend_on_other_requests(kind, llm) -> None:
    params = CASES[3]
    reference = llm.beam_search({"prompt_token_ids": PROMPTS[2]}, params)[0]

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(
            EngineArgs(str(directory(kind)), **ARGUMENTS), engine="inproc"
        )
        try:
            searches = [
                engine.beam_search(
                    {"prompt_token_ids": PROMPTS[2]}, params, request_id=f"search {i}"
                )
                for i in range(2)
            ]
            beside = SamplingParams(max_tokens=30, output_kind=RequestOutputKind.FINAL_ONLY)

            async def other() -> None:
                async for _ in engine.generate("other", beside, "other"):
                    pass

            first, second, _ = await asyncio.gather(*searches, other())
            for output in (first, second):
                assert [(s.tokens, s.text) for s in output.sequences] == [
                    (s.tokens, s.text) for s in reference.sequences
                ]
            with pytest.raises(InvalidParameterError, match="beam_width"):
                await engine.beam_search(
                    "x", BeamSearchParams(beam_width=21, max_tokens=5), "refused"
                )
            cancelled = asyncio.create_task(
                engine.beam_search(
                    "x", BeamSearchParams(beam_width=2, max_tokens=100, ignore_eos=True), "left"
                )
            )
            while not engine.has_unfinished_requests():
                assert not cancelled.done(), cancelled
                # in every iteration of the loop: a step of this model takes less than a millisecond
                await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert not engine.has_unfinished_requests()
        finally:
            engine.shutdown()

    asyncio.run(run())
