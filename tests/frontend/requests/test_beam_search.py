"""The search alone: its parameters, and a few steps computed by hand. tests/test_beam_search.py
compares it with transformers.
"""

from __future__ import annotations

import math

import pytest
from quire import BeamSearchParams, InvalidParameterError
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.frontend.requests.beam_search import BeamSearch, first_params
from quire.frontend.requests.input_processor import InputProcessor
from quire.frontend.requests.prompts import IMAGES, NO_IMAGES
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer

EOS, PROMPT = 302, [7, 8]


def make_search(max_model_len: int = 64, **params) -> BeamSearch:
    config = text_config(max_model_len=max_model_len)
    beam_params = BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **params})
    processor = InputProcessor(config, tiny_tokenizer(), [EOS])
    return BeamSearch(
        processor.process_inputs("r", PROMPT, first_params(beam_params)),
        beam_params,
        config.model_config,
    )


def output(error: str | None = None, **probabilities: float) -> RequestOutput:
    """One step of one beam; t5=0.5 means token 5 with probability 0.5."""
    position = {int(name[1:]): Logprob(math.log(p)) for name, p in probabilities.items()}
    return RequestOutput(
        "r", None, PROMPT, [CompletionOutput(0, "", [0], logprobs=[position])], True, error=error
    )


def beams(search: BeamSearch) -> list[tuple[list[int], float]]:
    return [(beam.token_ids, pytest.approx(math.exp(beam.cum_logprob))) for beam in search.running]


def test_a_search_by_hand() -> None:
    search = make_search(length_penalty=0.0)
    assert (
        search.step_prompts == [{"prompt_token_ids": PROMPT, IMAGES: NO_IMAGES}]
        and search.step_params.logprobs == search.num_candidates == 4
    )
    # the finished beam is not among the best two and is dropped
    search.advance([output(t1=0.5, t2=0.3, t3=0.1, t302=0.05)])
    assert beams(search) == [([1], 0.5), ([2], 0.3)] and search.finished == []
    assert search.step_prompts == [
        {"prompt_token_ids": [*PROMPT, 1], IMAGES: NO_IMAGES},
        {"prompt_token_ids": [*PROMPT, 2], IMAGES: NO_IMAGES},
    ]
    # 0.3 ends; 0.27, 0.1 and 0.015 continue
    search.advance([output(t302=0.6, t4=0.2), output(t5=0.9, t6=0.05)])
    assert beams(search) == [([2, 5], 0.27), ([1, 4], 0.1)] and [
        s.tokens for s in search.finished
    ] == [[1, EOS]]
    # the last step: 0.135 and 0.108 are the best two
    search.advance([output(t7=0.5, t302=0.4), output(t8=0.9, t9=0.1)])
    assert search.is_done
    result = search.output(tiny_tokenizer())
    assert [(s.tokens, s.finish_reason, s.stop_reason) for s in result.sequences] == [
        ([*PROMPT, 1], "stop", EOS),
        ([*PROMPT, 2, 5, 7], "length", None),
    ]
    assert [math.exp(s.score) for s in result.sequences] == pytest.approx([0.3, 0.135])
    assert (
        result.sequences[0].text == tiny_tokenizer().decode([*PROMPT, 1])
        and len(result.sequences[0].logprobs) == 1
    )


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [(True, 1.0, True), (False, 1.0, True), ("never", 1.0, False), ("never", 0.0, True)],
)
def test_when_a_search_ends(early_stopping, length_penalty, is_done) -> None:
    search = make_search(
        early_stopping=early_stopping, length_penalty=length_penalty, max_tokens=50
    )
    search.advance([output(t302=0.5, t1=0.4, t2=0.05)])
    assert not search.is_done
    # two are finished; at the present length 0.12 is worse
    search.advance([output(t302=0.5, t3=0.3), output(t4=0.01)])
    assert search.is_done == is_done


def test_an_error_ends_the_search_and_is_raised() -> None:
    search = make_search()
    search.advance([output(error="NaN in the logits", t1=0.5)])
    assert search.is_done and (search.output(None).sequences, search.output(None).error) == (
        [],
        "NaN in the logits",
    )


def test_max_model_len_limits_max_tokens() -> None:
    assert (
        make_search(max_tokens=100).max_tokens == 62 and make_search(max_tokens=5).max_tokens == 5
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", True),
        ("beam_width", 2.0),
        ("beam_width", 2**70),
        ("max_tokens", 0),
        ("max_tokens", None),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "no"),
        ("temperature", 0.5),
        ("temperature", math.nan),
        ("temperature", True),
        ("length_penalty", math.inf),
        ("length_penalty", "long"),
        ("length_penalty", 101),
        ("early_stopping", "always"),
        ("early_stopping", 1),
    ],
)
def test_bounds_of_parameters(name, value) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name}: must be") as refusal:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, name: value})
    assert refusal.value.parameter == name


def test_the_width_is_bounded_by_max_logprobs() -> None:
    assert make_search(beam_width=10).num_candidates == 20
    with pytest.raises(
        InvalidParameterError, match=r"beam_width: must be at most 10, got 11: .*max_logprobs=20"
    ):
        make_search(beam_width=11)
