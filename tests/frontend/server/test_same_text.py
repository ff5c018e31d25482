"""One conversation of several turns in every API: the same prompt, the same tokens, the same text,
whole and streamed.
"""

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from quire.tests.frontend.server.scripted import named_events

SYSTEM = "You are brief."
TURNS = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "2 + 3 = 5"},
    {"role": "user", "content": "What is 4 + 4?"},
]
Told = tuple[str, int, int]  # the text, tokens of the prompt and of the answer


def chat(server: httpx.Client, stream: bool) -> Told:
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, *TURNS],
        "max_tokens": 24,
        "temperature": 0,
        "stream": stream,
    }
    if not stream:
        said = server.post("/v1/chat/completions", json=body).json()
        return (
            said["choices"][0]["message"]["content"],
            said["usage"]["prompt_tokens"],
            said["usage"]["completion_tokens"],
        )
    answer = server.post(
        "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}
    )
    *chunks, last = [
        msgspec.json.decode(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]
    ]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    return text, last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]


def responses(server: httpx.Client, stream: bool) -> Told:
    body = {
        "input": TURNS,
        "instructions": SYSTEM,
        "max_output_tokens": 24,
        "temperature": 0,
        "stream": stream,
    }
    answer = server.post("/v1/responses", json=body)
    said = named_events(answer)[-1][1]["response"] if stream else answer.json()
    return (
        said["output"][0]["content"][0]["text"],
        said["usage"]["input_tokens"],
        said["usage"]["output_tokens"],
    )


def stored_responses(server: httpx.Client, stream: bool) -> Told:
    """The same conversation, with its first part stored by the server."""
    kept = server.post(
        "/v1/responses",
        json={
            "input": TURNS[:1],
            "max_output_tokens": 24,
            "temperature": 0,
            "instructions": SYSTEM,
        },
    ).json()
    assert kept["output"][0]["content"][0]["text"] == TURNS[1]["content"]
    body = {
        "input": TURNS[2]["content"],
        "previous_response_id": kept["id"],
        "instructions": SYSTEM,
        "max_output_tokens": 24,
        "temperature": 0,
    }
    answer = server.post("/v1/responses", json=body | {"stream": stream})
    said = named_events(answer)[-1][1]["response"] if stream else answer.json()
    return (
        said["output"][0]["content"][0]["text"],
        said["usage"]["input_tokens"],
        said["usage"]["output_tokens"],
    )


def anthropic(server: httpx.Client, stream: bool) -> Told:
    answer = server.post(
        "/v1/messages",
        json={
            "messages": TURNS,
            "system": SYSTEM,
            "max_tokens": 24,
            "temperature": 0,
            "stream": stream,
        },
    )
    if not stream:
        said = answer.json()
        text, usage = said["content"][0]["text"], said["usage"]
    else:
        events: list[Any] = named_events(answer)
        text = "".join(
            data["delta"]["text"] for name, data in events if name == "content_block_delta"
        )
        usage = events[-2][1]["usage"]
    return text, usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]


def ollama(server: httpx.Client, stream: bool) -> Told:
    messages, options = (
        [{"role": "system", "content": SYSTEM}, *TURNS],
        {"temperature": 0, "num_predict": 24},
    )
    answer = server.post(
        "/api/chat",
        json={"model": "bundled", "messages": messages, "options": options, "stream": stream},
    )
    said = [msgspec.json.decode(line) for line in answer.text.splitlines()]
    return (
        "".join(line["message"]["content"] for line in said),
        said[-1]["prompt_eval_count"],
        said[-1]["eval_count"],
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", [responses, stored_responses, anthropic, ollama])
def test_every_api_returns_the_text_of_openais_chat(
    server: httpx.Client, api: Callable[[httpx.Client, bool], Told], stream: bool
) -> None:
    assert api(server, stream) == chat(server, stream) == chat(server, False)
