"""Requests that pool: what the model decides, prompts, cut texts, refusals."""

from __future__ import annotations

import time
from functools import cache

import msgspec
import pytest
from quire import InvalidParameterError, PoolingParams, SamplingParams
from quire.frontend.requests.input_processor import InputProcessor
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.models.pooling import Dense, Pooling
from quire.tests.frontend.tiny_tokenizers import (
    text_config,
    tiny_tokenizer,
    tiny_tokenizer_directory,
)
from tokenizers import processors


def make_processor(pooling: Pooling | None = Pooling(), **arguments) -> InputProcessor:
    config = text_config(**arguments)
    if pooling is not None:
        size = pooling.dense[-1].out_features if pooling.dense else 64 * len(pooling.modes)
        pooling = msgspec.structs.replace(pooling, embedding_size=size)
    model_config = msgspec.structs.replace(config.model_config, pooling=pooling)
    return InputProcessor(
        msgspec.structs.replace(config, model_config=model_config), tokenizer_with_end(), [302]
    )


@cache
def tokenizer_with_end() -> Tokenizer:
    """Each text ends with a special token, as Qwen3-Embedding's do."""
    tokenizer = Tokenizer(tiny_tokenizer_directory())
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>",
        pair="$A <|endoftext|> $B:1 <|endoftext|>:1",
        special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))],
    )
    return tokenizer


def request(prompt="the cat", params=PoolingParams(), pooling=Pooling(), **options):
    return make_processor(pooling).process_inputs("r", prompt, params, **options).core_request


def test_the_model_decides_what_a_request_leaves_open() -> None:
    assert request().params == PoolingParams(task="embed")
    mean = request(pooling=Pooling(modes=("mean",))).params
    assert mean == PoolingParams(task="embed", skip_reading_prefix_cache=True)
    by_token = request(params=PoolingParams(task="token_embed")).params
    assert by_token.skip_reading_prefix_cache
    assert request(pooling=Pooling(tasks=("classify",))).params.task == "classify"
    made = request(params=PoolingParams(timeout_s=5))
    assert 4 < made.deadline - time.monotonic() <= 5


def test_prompts_may_fill_the_context_and_longer_ones_are_refused_or_cut() -> None:
    end = tiny_tokenizer().token_to_id("<|endoftext|>")
    assert len(request([1] * 64).prompt_token_ids) == 64
    with pytest.raises(InvalidParameterError, match="is 65 tokens long.*at most 64"):
        request([1] * 65)
    for cut in (-1, 8):
        most = 64 if cut == -1 else cut
        made = request("a" * 99, PoolingParams(truncate_prompt_tokens=cut)).prompt_token_ids
        assert len(made) == most and made[-1] == end
        made = request([1] * 99, PoolingParams(truncate_prompt_tokens=cut)).prompt_token_ids
        assert made == [1] * most
    own = Pooling(max_seq_length=10)
    made = request("a" * 99, pooling=own).prompt_token_ids
    assert len(made) == 10 and made[-1] == end
    assert len(request("a" * 99, PoolingParams(truncate_prompt_tokens=20), own).prompt_token_ids)
    with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens: .*at most 64"):
        request("a", PoolingParams(truncate_prompt_tokens=65))


@pytest.mark.parametrize("prompt", ["a" * 99, [1] * 99])
@pytest.mark.parametrize(
    ("own", "cut", "most"), [(None, -1, 64), (10, None, 10), (10, -1, 10), (10, 8, 8), (None, 8, 8)]
)
def test_prompts_that_must_fit_are_never_cut(prompt, own, cut, most: int) -> None:
    """Also where the model's files have a length at which other prompts are cut."""
    params = PoolingParams(truncate_prompt_tokens=cut, must_fit=True)
    pooling = Pooling(max_seq_length=own)
    with pytest.raises(InvalidParameterError, match=f"prompt: is \\d+ tokens .* at most {most}$"):
        request(prompt, params, pooling)
    assert len(request([1] * most, params, pooling).prompt_token_ids) == most


def test_named_prompts_and_lower_case() -> None:
    plain = request("query: a cat").prompt_token_ids
    named = Pooling(prompts={"query": "query: ", "none": ""}, default_prompt_name="query")
    assert request("a cat", pooling=named, prompt_name="query").prompt_token_ids == plain
    assert request("a cat", pooling=named).prompt_token_ids == plain
    bare = request("a cat").prompt_token_ids
    assert request("a cat", pooling=named, prompt_name="none").prompt_token_ids == bare
    assert request("A Cat", pooling=Pooling(do_lower_case=True)).prompt_token_ids == bare
    with pytest.raises(InvalidParameterError, match="prompt_name: .*'query', 'none'.*got 'x'"):
        request("a", pooling=named, prompt_name="x")
    with pytest.raises(InvalidParameterError, match="prompt_name"):
        request("a", SamplingParams(), prompt_name="query")


def test_pairs_of_texts() -> None:
    pair = {"prompt": "the cat", "text_pair": "the dog"}
    made = request(pair, pooling=Pooling(has_token_types=True))
    first = len(request("the cat").prompt_token_ids)
    assert made.params.second_text_start == first
    assert made.prompt_token_ids == [
        *request("the cat").prompt_token_ids,
        *request("the dog").prompt_token_ids,
    ]
    assert request(pair).params.second_text_start == 0
    with pytest.raises(InvalidParameterError, match="text_pair"):
        request(pair, SamplingParams())


def test_dimensions() -> None:
    def refuse(pooling, dimensions, problem, task="embed"):
        with pytest.raises(InvalidParameterError, match=f"dimensions: {problem}"):
            request("a", PoolingParams(dimensions=dimensions, task=task), pooling)

    refuse(Pooling(), 8, "must not be given: the model was not trained")
    some = Pooling(matryoshka_dimensions=(8, 16), tasks=("embed", "classify"))
    assert request("a", PoolingParams(dimensions=8), some).params.dimensions == 8
    refuse(some, 9, "must be one of 8, 16, got 9")
    refuse(some, 8, "is the length of embeddings", "classify")
    any_length = Pooling(is_matryoshka=True)
    assert request("a", PoolingParams(dimensions=64), any_length).params.dimensions == 64
    refuse(any_length, 65, "must be at most 64")
    dense = Dense(folder="2_Dense", in_features=64, out_features=128)
    refuse(Pooling(is_matryoshka=True, dense=(dense,)), 129, "must be at most 128")


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (dict(task="score"), "task: .*a score is the task classify of a pair"),
        (dict(task="encode"), "task: .*token_embed and token_classify"),
        (dict(normalize=True), "normalize: was removed; use use_activation"),
        (dict(task="classify"), "task: must be one of embed, token_embed for this model"),
        (dict(second_text_start=3), "second_text_start"),
        (dict(instruction_length=3), "instruction_length"),
    ],
)
def test_refused_parameters(params, problem) -> None:
    with pytest.raises(InvalidParameterError, match=problem):
        request("a", PoolingParams(**params))


def test_models_of_one_kind_refuse_the_other() -> None:
    with pytest.raises(InvalidParameterError, match="params: must be SamplingParams: the model"):
        request("a", pooling=None)
    with pytest.raises(InvalidParameterError, match="params: must be PoolingParams: this engine"):
        make_processor(runner="pooling").process_inputs("r", "a", SamplingParams())


def test_a_batch_is_its_requests_one_by_one() -> None:
    processor = make_processor(Pooling(max_seq_length=12))
    end = {"prompt": "salted", "cache_salt": "s"}
    prompts = ["a cat", [1, 2, 3], {"prompt": "the dog", "text_pair": "a"}, end, "x" * 50]
    ids = [str(i) for i in range(len(prompts))]
    batch = processor.process_batch(ids, prompts, PoolingParams(), priority=3, owner="me")
    for request_id, prompt, made in zip(ids, prompts, batch, strict=True):
        own = processor.process_inputs(request_id, prompt, PoolingParams(), priority=3, owner="me")
        assert made.request_id == request_id and made.prompt == own.prompt
        replace = msgspec.structs.replace
        same = {"request_id": "", "arrival_time": 0.0}
        assert replace(made.core_request, **same) == replace(own.core_request, **same)
    with pytest.raises(InvalidParameterError, match="request 1 of 2, counted from 0"):
        processor.process_batch(["0", "1"], ["a", [99999]], PoolingParams())


def test_tokens_of_an_instruction_are_counted_where_pooling_leaves_them_out() -> None:
    """Without the special token at the end; not of token ids, nor where the prompt takes part."""
    prompts = {"query": "query: ", "none": ""}
    left_out = Pooling(include_prompt=False, prompts=prompts, default_prompt_name="query")
    made = request("the cat", pooling=left_out)
    assert made.params.instruction_length == len(tiny_tokenizer().encode("query: "))
    assert request("the cat", pooling=left_out, prompt_name="none").params.instruction_length == 0
    assert request([1, 2, 3], pooling=left_out).params.instruction_length == 0
    included = Pooling(prompts=prompts, default_prompt_name="query")
    assert request("the cat", pooling=included).params.instruction_length == 0
