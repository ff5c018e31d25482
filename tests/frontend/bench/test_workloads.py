"""The workloads: lengths, seeds, shared prefixes, files of every form."""

import json
from pathlib import Path
from typing import Any

import pytest
from quire import InvalidParameterError
from quire.frontend.bench.options import WorkloadOptions
from quire.frontend.bench.workloads import WorkloadRequest, make_requests
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find_model_directory("bundled"))


def make(tokenizer: Tokenizer | None = None, **options: Any) -> list[WorkloadRequest]:
    return make_requests(WorkloadOptions(**options), tokenizer)


@pytest.mark.parametrize("dataset_name", ["random", "prefix", "multi-turn"])
@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_the_same_seed_gives_the_same_requests(
    dataset_name: str, with_tokenizer: bool, tokenizer: Tokenizer
) -> None:
    options = {
        "dataset_name": dataset_name,
        "num_prompts": 5,
        "input_len": 30,
        "prefix_len": 10,
        "range_ratio": 0.5,
    }
    first, again, other = (
        make(tokenizer if with_tokenizer else None, **options, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len({request.prompt for request in first}) == 5


def test_words_without_a_tokenizer() -> None:
    [request] = make(num_prompts=1, input_len=100, output_len=7)
    assert len(request.prompt.split()) == 100
    assert (request.num_prompt_tokens, request.max_tokens, request.follow_ups) == (None, 7, ())


def test_texts_have_the_requested_number_of_tokens(tokenizer: Tokenizer) -> None:
    requests = make(tokenizer, num_prompts=20, input_len=50)
    counts = [len(tokenizer.encode(request.prompt)) for request in requests]
    assert counts == [request.num_prompt_tokens for request in requests]
    assert sum(abs(count - 50) for count in counts) <= 20  # rarely off by one


def test_token_ids(tokenizer: Tokenizer) -> None:
    requests = make(tokenizer, num_prompts=20, input_len=50, token_ids=True)
    assert (
        {len(request.prompt) for request in requests}
        == {request.num_prompt_tokens for request in requests}
        == {50}
    )
    used = {token_id for request in requests for token_id in request.prompt}
    assert max(used) < tokenizer.vocab_size and not used & tokenizer.special_ids


def test_lengths_fill_their_range() -> None:
    requests = make(num_prompts=300, input_len=10, output_len=20, range_ratio=0.3)
    assert {len(request.prompt.split()) for request in requests} == set(range(7, 14))
    assert {request.max_tokens for request in requests} == set(range(14, 27))


@pytest.mark.parametrize("token_ids", [False, True])
def test_prefixes_are_shared_round_robin(token_ids: bool, tokenizer: Tokenizer) -> None:
    options = {
        "dataset_name": "prefix",
        "num_prompts": 9,
        "input_len": 40,
        "prefix_len": 25,
        "num_prefixes": 3,
        "token_ids": token_ids,
    }
    requests = make(tokenizer, **options)
    beginnings = [str(request.prompt[:25]) for request in requests]
    assert len(set(beginnings)) == 3 and beginnings[:3] * 3 == beginnings
    assert len({str(request.prompt) for request in requests}) == 9
    if token_ids:
        assert {len(request.prompt) for request in requests} == {40}


def test_conversations_have_turns() -> None:
    requests = make(dataset_name="multi-turn", num_prompts=4, input_len=6, num_turns=3)
    assert [len(request.follow_ups) for request in requests] == [2] * 4
    assert {
        len(text.split()) for request in requests for text in (request.prompt, *request.follow_ups)
    } == {6}


SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "What is 2 + 3?"},
            {"from": "gpt", "value": "It is five of course"},
        ],
    },
    {
        "id": "b",
        "conversations": [
            {"from": "system", "value": "Be brief"},
            {"from": "human", "value": "Hi"},
        ],
    },
    {"id": "c", "conversations": []},
    {"id": "d"},
]
LINES = [
    {"prompt": "one"},
    {"prompt": "two", "completion": "a b c"},
    {"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "a b"}]},
    "four",
    {"prompt": ["no", "text"]},
]


def test_sharegpt_s_form(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT))
    requests = make(dataset_name="sharegpt", dataset_path=str(path), num_prompts=4)
    assert {(request.prompt, request.max_tokens) for request in requests} == {
        ("What is 2 + 3?", 5),
        ("Hi", 128),
    }
    assert requests[:2] == requests[2:]  # starts over
    assert {
        request.max_tokens
        for request in make(dataset_name="sharegpt", dataset_path=str(path), output_len=9)
    } == {9}


def test_json_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n")
    requests = make(dataset_name="sharegpt", dataset_path=str(path), num_prompts=4)
    assert {(request.prompt, request.max_tokens) for request in requests} == {
        ("one", 128),
        ("two", 3),
        ("three", 2),
        ("four", 128),
    }
    requests = make(
        tokenizer, dataset_name="sharegpt", dataset_path=str(path), num_prompts=4, token_ids=True
    )
    assert {tuple(request.prompt) for request in requests} == {
        tuple(tokenizer.encode(word)) for word in ("one", "two", "three", "four")
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot read"),
        ("{", "is neither JSON nor JSON lines"),
        ("[]", "holds no prompt"),
        ('{"a": 1}', "holds no prompt"),
        ("[" * 100_000, "neither"),
    ],
)
def test_files_that_cannot_be_used(text: str | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidParameterError, match=sentence):
        make(dataset_name="sharegpt", dataset_path=str(path))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"input_len": 0}, "--input-len"),
        ({"output_len": 0}, "--output-len"),
        ({"range_ratio": 1.0}, "--range-ratio"),
        ({"range_ratio": float("nan")}, "--range-ratio"),
        ({"dataset_name": "sharegpt"}, "--dataset-path"),
        ({"dataset_path": "x"}, "--dataset-path"),
        ({"dataset_name": "prefix", "input_len": 10, "prefix_len": 10}, "--prefix-len"),
        ({"token_ids": True}, "--token-ids"),
        ({"token_ids": True, "dataset_name": "multi-turn"}, "--token-ids"),
    ],
)
def test_options_out_of_their_range(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        make(**options)
    assert caught.value.parameter == name
