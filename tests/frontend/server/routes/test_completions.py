"""/v1/completions over HTTP: order of chunks, echo, log-probabilities in OpenAI's shape, n,
best_of, what is refused.
"""

import json
from typing import Any

import httpx2 as httpx
import pytest

PROMPT = "Once upon a time"
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def events(answer: httpx.Response) -> list[dict]:
    """Return the stream's events without [DONE], which must be the last."""
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]", (
        answer.text
    )
    return [json.loads(line[6:]) for line in lines[:-1]]


def complete(server: httpx.Client, **fields: Any) -> dict:
    answer = server.post("/v1/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_stream_and_a_whole_answer_agree(server: httpx.Client) -> None:
    whole = server.post("/v1/completions", json=BODY).json()
    chunks = events(
        server.post(
            "/v1/completions",
            json=BODY | {"stream": True, "stream_options": {"include_usage": True}},
        )
    )
    assert (
        "".join(c["choices"][0]["text"] for c in chunks[:-1]) == whole["choices"][0]["text"] != ""
    )
    assert (
        chunks[-1]["choices"] == []
        and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    )
    assert all(c["usage"] is None for c in chunks[:-1])
    assert (
        [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1]
        == whole["choices"][0]["finish_reason"]
        == "length"
    )
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")
    heads = {(c["id"], c["object"], c["model"], c["system_fingerprint"]) for c in chunks}
    assert len(heads) == 1 and whole["system_fingerprint"] == chunks[0]["system_fingerprint"] != ""
    # every chunk has the same fields, in the same order
    assert len({tuple(c) for c in chunks[:-1]}) == 1


def test_without_stream_options_no_chunk_has_usage(server: httpx.Client) -> None:
    assert not any(
        "usage" in chunk
        for chunk in events(server.post("/v1/completions", json=BODY | {"stream": True}))
    )


def test_usage_in_every_chunk(server: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(
        server.post("/v1/completions", json=BODY | {"stream": True, "stream_options": options})
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 8 and chunks[0]["usage"]["prompt_tokens"] > 0


def test_several_prompts_and_completions(server: httpx.Client) -> None:
    fields = {"prompt": ["One day", [5, 6, 7]], "n": 2, "temperature": 1, "seed": 3}
    whole = complete(server, **fields)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for chunk in events(server.post("/v1/completions", json=BODY | fields | {"stream": True})):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]


def test_log_probabilities_with_text_offsets(server: httpx.Client) -> None:
    choice = complete(server, logprobs=2)["choices"][0]
    found = choice["logprobs"]
    assert {
        len(found[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    } == {8}
    assert "".join(found["tokens"]) == choice["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        # greedy: the sampled token is the most likely
        assert top[token] == logprob == max(top.values()) and 2 <= len(top) <= 3


def test_echo_gives_the_prompt_and_its_log_probabilities(server: httpx.Client) -> None:
    plain = complete(server, logprobs=1)["choices"][0]
    echoed = complete(server, logprobs=1, echo=True)["choices"][0]
    assert echoed["text"] == PROMPT + plain["text"]
    found, num_prompt_tokens = echoed["logprobs"], len(echoed["logprobs"]["tokens"]) - 8
    assert (
        found["token_logprobs"][0] is None
        and found["top_logprobs"][0] is None
        and found["text_offset"][0] == 0
    )
    assert "".join(found["tokens"]) == echoed["text"]
    assert found["token_logprobs"][num_prompt_tokens:] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert found["text_offset"][num_prompt_tokens] == len(PROMPT)
    assert [
        echoed["text"].startswith(t, o)
        for t, o in zip(found["tokens"], found["text_offset"], strict=True)
    ].count(False) == 0


def test_a_long_echo(server: httpx.Client) -> None:
    text = "One day a cat " * 100
    found = complete(server, prompt=text, max_tokens=1, logprobs=19, echo=True)["choices"][0][
        "logprobs"
    ]
    assert "".join(found["tokens"]).startswith(text) and all(
        19 <= len(top) <= 20 for top in found["top_logprobs"][1:]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_scores_a_text(server: httpx.Client, stream: bool) -> None:
    """As in evaluations: no new token, only the prompt's log-probabilities."""
    body = BODY | {"max_tokens": 0, "echo": True, "logprobs": 1, "prompt": [PROMPT, "The cat"]}
    if stream:
        chunks = [
            c["choices"][0]
            for c in events(server.post("/v1/completions", json=body | {"stream": True}))
        ]
        choices = [next(c for c in chunks if c["index"] == i and c["text"]) for i in range(2)]
        assert [c["finish_reason"] for c in chunks].count("length") == 2
    else:
        answer = server.post("/v1/completions", json=body).json()
        choices = answer["choices"]
        assert answer["usage"]["completion_tokens"] == 0 and {
            c["finish_reason"] for c in choices
        } == {"length"}
    assert [choice["text"] for choice in choices] == [PROMPT, "The cat"]
    assert all("".join(choice["logprobs"]["tokens"]) == choice["text"] for choice in choices)


def test_a_streamed_echo_comes_first_with_the_same_content(server: httpx.Client) -> None:
    fields = {"logprobs": 1, "echo": True, "return_token_ids": True}
    whole = complete(server, **fields)["choices"][0]
    chunks = [
        c["choices"][0]
        for c in events(server.post("/v1/completions", json=BODY | fields | {"stream": True}))
    ]
    assert chunks[0]["text"] == PROMPT and "".join(c["text"] for c in chunks) == whole["text"]
    for key in ("tokens", "text_offset"):
        assert [x for c in chunks if c["logprobs"] for x in c["logprobs"][key]] == whole[
            "logprobs"
        ][key]
    assert [i for c in chunks for i in c["token_ids"]] == whole["token_ids"] and chunks[0][
        "prompt_token_ids"
    ] == whole["prompt_token_ids"]


def test_the_best_of_several(server: httpx.Client) -> None:
    fields = {"temperature": 1, "seed": 5, "logprobs": 0}
    made = complete(server, n=4, **fields)["choices"]
    best = max(
        made, key=lambda c: sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"])
    )
    answer = complete(server, best_of=4, **fields)
    assert [c["text"] for c in answer["choices"]] == [best["text"]] and answer["choices"][0][
        "index"
    ] == 0
    assert answer["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in made)


def test_tokens_as_ids_and_prompt_log_probabilities(server: httpx.Client) -> None:
    choice = complete(
        server,
        logprobs=1,
        return_tokens_as_token_ids=True,
        return_token_ids=True,
        prompt_logprobs=1,
    )["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(
        choice["prompt_token_ids"]
    )
    assert {"logprob", "rank", "decoded_token"} == set(
        choice["prompt_logprobs"][1][str(choice["prompt_token_ids"][1])]
    )


def test_a_stop_string_ends_it(server: httpx.Client) -> None:
    text = complete(server)["choices"][0]["text"]
    choice = complete(server, stop=[text[5:8]])["choices"][0]
    assert choice["text"] == text[: text.index(text[5:8])] and (
        choice["finish_reason"],
        choice["stop_reason"],
    ) == ("stop", text[5:8])


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"guided_regex": "[0-9]{3}"}, None), ({"structured_outputs": {"choice": ["red"]}}, "red")],
)
def test_guided_output(server: httpx.Client, fields: dict, text: str | None) -> None:
    found = complete(server, **fields)["choices"][0]["text"]
    assert found == text if text else found.isdigit()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": ["a", [1.5]]}, "prompt[1][0]", "invalid_type"),
        ({"prompt": [-1]}, "prompt[0]", "integer_below_min_value"),
        ({"prompt": [10**6]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 2049}, "prompt", "array_above_max_length"),
        ({"prompt": "a " * 5000}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 10**6}, "prompt", "context_length_exceeded"),
        ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
        ({"logprobs": 21}, "logprobs", "integer_above_max_value"),
        ({"suffix": "."}, "suffix", "unsupported_value"),
        ({"n": 3, "best_of": 2}, "best_of", "integer_below_min_value"),
        ({"best_of": 2, "stream": True}, "best_of", "unsupported_value"),
        ({"n": 2}, "n", "invalid_value"),  # greedy
        ({"temperature": 1, "n": 129}, "n", "integer_above_max_value"),
        ({"top_p": 2}, "top_p", "decimal_above_max_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "decimal_above_max_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
        ({"cache_salt": ""}, "cache_salt", "empty_string"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"guided_regex": "("}, "guided_regex", "invalid_value"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "invalid_value",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "invalid_value",
        ),
        ({"model": "gpt-4"}, "model", "model_not_found"),
    ],
)
def test_errors_name_the_field(server: httpx.Client, fields: dict, param: str, code: str) -> None:
    answer = server.post("/v1/completions", json=BODY | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (
        404 if param == "model" else 400,
        param,
        code,
    ), error
    assert error["type"] and error["message"]


def test_unknown_fields_are_listed_with_their_path(server: httpx.Client) -> None:
    answer = server.post(
        "/v1/completions",
        json=BODY | {"zeta": 1, "stream": True, "stream_options": {"alpha": 2}, "user": "x"},
    )
    assert (
        answer.headers["x-unknown-params"] == "stream_options.alpha,zeta"
        and answer.headers["x-ignored-params"] == "user"
    )
