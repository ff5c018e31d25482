"""/v1/messages over HTTP: errors, keys, and the same text as OpenAI's chat."""

import httpx2 as httpx
import pytest
from quire.tests.frontend.server.scripted import (
    ScriptedEngine,
    named_events,
    post,
    scripted_app,
)

URL = "/v1/messages"
BODY = {"max_tokens": 16, "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
TOOLS = [{"name": "add", "input_schema": {"type": "object"}}]


def test_a_failure_before_the_stream_is_a_plain_answer_and_inside_it_an_event() -> None:
    answer = post(
        scripted_app(ScriptedEngine([RuntimeError("secret")])), URL, BODY | {"stream": True}
    )
    assert (
        answer.status_code == 500
        and answer.json()["type"] == "error"
        and answer.json()["error"]["type"] == "api_error"
    )
    events = named_events(
        post(
            scripted_app(ScriptedEngine(["a", RuntimeError("secret")])),
            URL,
            BODY | {"stream": True},
        )
    )
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "error",
    ]
    assert (
        events[-1][1]["type"] == "error"
        and events[-1][1]["error"]["type"] == "api_error"
        and "secret" not in str(events)
    )


@pytest.mark.parametrize(
    ("change", "status", "kind", "word"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        (
            {"messages": [{"role": "user", "content": "word " * 600}]},
            400,
            "invalid_request_error",
            "512",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "text only",
        ),
    ],
)
def test_errors_have_anthropics_format(change: dict, status: int, kind: str, word: str) -> None:
    answer = post(scripted_app(ScriptedEngine(["a"])), URL, BODY | change)
    error = answer.json()
    assert answer.status_code == status and answer.headers["request-id"]
    assert (
        error.keys() == {"type", "error"}
        and error["error"]["type"] == kind
        and word in error["error"]["message"]
    )


def test_keys_in_anthropics_header() -> None:
    app = scripted_app(ScriptedEngine(["a"]), api_key=["k"])
    assert (
        post(app, URL, BODY, **{"x-api-key": "k", "anthropic-version": "2023-06-01"}).status_code
        == 200
    )
    refusal = post(app, URL, BODY, **{"x-api-key": "no"})
    assert refusal.status_code == 401 and refusal.json()["error"]["type"] == "authentication_error"


def test_any_number_of_tokens_is_counted(server: httpx.Client) -> None:
    counted = server.post(f"{URL}/count_tokens", json={"messages": BODY["messages"]}).json()
    assert counted == {"input_tokens": 16}
    many = server.post(
        f"{URL}/count_tokens", json={"messages": [{"role": "user", "content": "word " * 20_000}]}
    ).json()
    assert many["input_tokens"] > 4096


def test_the_same_text_as_openais_chat(server: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    chat = server.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 16, "temperature": 0}
    ).json()
    said = server.post(
        URL, json={"messages": messages, "max_tokens": 10**9, "temperature": 0}
    ).json()
    assert (
        said["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
        and said["stop_reason"] == "end_turn"
    )
    usage = said["usage"]
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    )
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_a_stop_sequence_and_a_beginning_of_the_answer(server: httpx.Client) -> None:
    messages = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "2 + 3"},
    ]
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "stop_sequences": ["5"]}
    said = server.post(URL, json=body).json()
    assert said["content"] == [{"type": "text", "text": " = "}] and (
        said["stop_reason"],
        said["stop_sequence"],
    ) == ("stop_sequence", "5")
