"""/tokenize, /detokenize and /tokenizer_info over HTTP."""

from typing import Any

import httpx2 as httpx
import pytest

MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]


def test_round_trip(server: httpx.Client) -> None:
    found = server.post(
        "/tokenize", json={"prompt": "Once upon a time", "return_token_strs": True}
    ).json()
    assert (
        found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 0
        and found["max_model_len"] > 0
    )
    assert server.post("/detokenize", json={"tokens": found["tokens"]}).json() == {
        "prompt": "Once upon a time"
    }
    assert server.post("/tokenize", json={"prompt": "a"}).json()["token_strs"] is None


def test_a_conversation_has_the_tokens_of_chat(server: httpx.Client) -> None:
    found = server.post("/tokenize", json={"messages": MESSAGES}).json()
    answer = server.post(
        "/v1/chat/completions",
        json={"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True},
    ).json()
    assert found["tokens"] == answer["prompt_token_ids"]
    without = server.post(
        "/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}
    ).json()
    assert (
        found["tokens"][: without["count"]] == without["tokens"]
        and without["count"] < found["count"]
    )


def test_tokenizer_info(server: httpx.Client) -> None:
    found = server.get("/tokenizer_info").json()
    assert (
        found["eos_token"] == "<|im_end|>"
        and found["bos_token"] is None
        and "im_start" in found["chat_template"]
        and found["vocab_size"] == 2144
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs.tools",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2144]}, "tokens"),
    ],
)
def test_errors_name_the_field(
    server: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
