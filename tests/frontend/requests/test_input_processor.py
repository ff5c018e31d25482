"""Forms of a prompt, refusals, and defaults."""

from __future__ import annotations

import time

import msgspec
import pytest
from quire import (
    InvalidParameterError,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.frontend.requests.input_processor import InputProcessor, derive_seed
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer

EOS = [302, 300]


def make_processor(**model_arguments) -> InputProcessor:
    return InputProcessor(text_config(**model_arguments), tiny_tokenizer(), EOS)


def core_request(prompt="hello", params: SamplingParams | None = None, **options):
    return (
        make_processor()
        .process_inputs("r", prompt, params or SamplingParams(), **options)
        .core_request
    )


def test_forms_of_a_prompt() -> None:
    ids = tiny_tokenizer().encode("hello")
    for prompt in (
        "hello",
        ids,
        {"prompt": "hello"},
        {"prompt_token_ids": ids},
        {"prompt": "other", "prompt_token_ids": ids},
    ):
        assert core_request(prompt).prompt_token_ids == ids
    for prompt, text in (
        ("hello", "hello"),
        (ids, None),
        ({"prompt": "x", "prompt_token_ids": ids}, "x"),
    ):
        assert make_processor().process_inputs("r", prompt, SamplingParams()).prompt == text
    assert core_request({"prompt": "hello", "cache_salt": "me"}).cache_salt == "me"
    request = core_request(ids)
    ids.append(5)
    assert request.prompt_token_ids != ids  # the caller may change its list


@pytest.mark.parametrize(
    ("prompt", "parameter", "problem"),
    [
        ("", "prompt", "must not be empty"),
        ([], "prompt", "must not be empty"),
        ({}, "prompt", "must have `prompt` or `prompt_token_ids`"),
        (5, "prompt", "must be a string, a list of token ids or a dict, got int"),
        (None, "prompt", "got NoneType"),
        ({"prompt": 5}, "prompt", "must be a string, got int"),
        ({"prompt": "a", "encoder_prompt": {}}, "prompt", "unknown key 'encoder_prompt'"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "not empty"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt", "must be a string"),
        ({"prompt": "a", "cache_salt": "\udfff"}, "cache_salt", "UTF-8"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids", "must be a list of integers"),
        ([1, "2"], "prompt_token_ids", "must be a list of integers"),
        ([1, True], "prompt_token_ids", "must be a list of integers"),
        ([1, 320], "prompt_token_ids", "between 0 and 319, the model's vocabulary, got 320"),
        ([1, -1], "prompt_token_ids", "between 0 and 319, the model's vocabulary, got -1"),
        ([1] * 64, "prompt", "is 64 tokens long; with max_model_len=64 it can have at most 63"),
        ("lone surrogate \ud800", "prompt", "UTF-8"),
    ],
)
def test_refused_prompts(prompt, parameter, problem) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        core_request(prompt)
    assert raised.value.parameter == parameter and problem in str(raised.value)


def test_the_longest_prompt_leaves_one_token() -> None:
    assert core_request([1] * 63, SamplingParams(max_tokens=None)).sampling_params.max_tokens == 1


@pytest.mark.parametrize("params", [PoolingParams(), {"temperature": 0}, None])
def test_params_of_another_kind_are_refused(params) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        make_processor().process_inputs("r", "a", params)
    assert raised.value.parameter == "params"


def test_request_id_must_be_a_string() -> None:
    for request_id in (5, "\ud800"):
        with pytest.raises(InvalidParameterError, match="request_id"):
            make_processor().process_inputs(request_id, "a", SamplingParams())


def test_without_a_tokenizer() -> None:
    processor = InputProcessor(text_config(skip_tokenizer_init=True), None, EOS)
    assert processor.process_inputs(
        "r", [1, 2], SamplingParams()
    ).core_request.prompt_token_ids == [1, 2]
    with pytest.raises(
        InvalidParameterError, match="prompt: must be token ids.*skip_tokenizer_init"
    ):
        processor.process_inputs("r", "text", SamplingParams())
    with pytest.raises(InvalidParameterError, match="stop: needs a tokenizer"):
        processor.process_inputs("r", [1], SamplingParams(stop="x"))


def test_max_tokens_is_limited_to_the_context() -> None:
    prompt = [1] * 60
    assert core_request(prompt, SamplingParams(max_tokens=None)).sampling_params.max_tokens == 4
    assert core_request(prompt, SamplingParams(max_tokens=100)).sampling_params.max_tokens == 4
    assert core_request(prompt, SamplingParams(max_tokens=3)).sampling_params.max_tokens == 3
    cut = core_request(prompt, SamplingParams(max_tokens=100, min_tokens=50)).sampling_params
    assert (cut.max_tokens, cut.min_tokens) == (4, 4)


def test_end_of_sequence_ids() -> None:
    assert core_request().eos_token_ids == EOS
    assert core_request(params=SamplingParams(ignore_eos=True)).eos_token_ids == []


@pytest.mark.parametrize("ids", [[], [320], [-1, 10**6]])
def test_structured_output_needs_an_end_of_sequence_token(ids) -> None:
    """A fault of the model is not reported as one of the request's ignore_eos."""
    processor = InputProcessor(text_config(), tiny_tokenizer(), ids)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidParameterError, match="between 0 and 319, the model's voc") as raised:
        processor.process_inputs("r", "a", params)
    assert raised.value.parameter == "structured_outputs"
    params = msgspec.structs.replace(params, ignore_eos=True)
    with pytest.raises(InvalidParameterError, match="ignore_eos: must be False"):
        processor.process_inputs("r", "a", params)
    processor = InputProcessor(text_config(), tiny_tokenizer(), [320, 319])
    processor.process_inputs("r", "a", msgspec.structs.replace(params, ignore_eos=False))


def test_seeds_depend_on_the_scripts_seed_and_the_request() -> None:
    def seeds(base: int) -> list[int]:
        processor = make_processor(seed=base)
        return [
            processor.process_inputs("r", "a", SamplingParams()).core_request.sampling_params.seed
            for _ in range(20)
        ]

    assert seeds(0) == seeds(0) and len(set(seeds(0) + seeds(1))) == 40
    assert all(0 <= seed < 2**63 for seed in seeds(2**63 - 1))
    processor = make_processor()
    given = processor.process_inputs(
        "r", "a", SamplingParams(seed=5)
    ).core_request.sampling_params.seed
    drawn = processor.process_inputs("r", "a", SamplingParams()).core_request.sampling_params.seed
    assert (given, drawn) == (5, seeds(0)[1])  # a seed depends only on the request's index
    assert derive_seed(0, 0) == 0xE220A8397B1DCDAF >> 1  # the published sequence of SplitMix64


def test_ids_are_unique_and_times_are_kept() -> None:
    processor = make_processor()
    requests = [processor.process_inputs("same", "a", SamplingParams()) for _ in range(100)]
    assert len({request.core_request.request_id for request in requests}) == 100
    assert all(
        request.request_id == "same" and request.core_request.request_id.startswith("same-")
        for request in requests
    )
    assert abs(core_request().arrival_time - time.time()) < 60
    request = core_request(arrival_time=12.5, priority=-3)
    assert (request.arrival_time, request.priority) == (12.5, -3)


def test_a_refused_request_consumes_no_seed() -> None:
    processor = make_processor()
    with pytest.raises(InvalidParameterError):
        processor.process_inputs("r", "", SamplingParams())
    assert processor.process_inputs(
        "r", "a", SamplingParams()
    ).core_request.sampling_params.seed == derive_seed(0, 0)
