"""/v1/chat/completions over HTTP: order of chunks, log-probabilities, prefill, structured output,
and the paths of errors.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.routes.test_completions import events
from quire.tests.frontend.server.scripted import TOOL_TEMPLATE

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
BODY = {"messages": QUESTION, "max_tokens": 16, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(server: httpx.Client, **fields: Any) -> dict:
    answer = server.post("/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: httpx.Client, **fields: Any) -> list[dict]:
    return events(server.post("/v1/chat/completions", json=BODY | fields | {"stream": True}))


def test_a_stream_and_a_whole_answer_agree(server: httpx.Client) -> None:
    whole = chat(server)
    chunks = streamed(server)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None} and deltas[-1] == {}
    assert all(list(delta) == ["content"] for delta in deltas[1:-1])
    assert (
        "".join(delta.get("content", "") for delta in deltas)
        == whole["choices"][0]["message"]["content"]
        == "2 + 3 = 5"
    )
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == whole["choices"][0]["finish_reason"] == "stop" and set(reasons[:-1]) == {
        None
    }
    assert not any("usage" in chunk for chunk in chunks)
    assert (whole["object"], chunks[0]["object"]) == ("chat.completion", "chat.completion.chunk")
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}) == 1


def test_usage_is_in_a_separate_last_chunk(server: httpx.Client) -> None:
    chunks = streamed(server, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == chat(server)["usage"]["completion_tokens"]
    always = streamed(
        server, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]
    assert counts == sorted(counts) and counts[-1] == chunks[-1]["usage"]["completion_tokens"]


def test_log_probabilities(server: httpx.Client) -> None:
    whole = chat(server, logprobs=True, top_logprobs=3, return_token_ids=True)
    choice = whole["choices"][0]
    content = choice["logprobs"]["content"]
    assert (
        len(content) == len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
        and choice["logprobs"]["refusal"] is None
    )
    text = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert text == "".join(entry["token"] for entry in content) and text.startswith(
        choice["message"]["content"]
    )
    for entry in content:
        assert (
            len(entry["top_logprobs"]) == 3 and entry["top_logprobs"][0]["token"] == entry["token"]
        )
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True) and values[0] == entry["logprob"]
    chunks = [
        c["choices"][0]
        for c in streamed(server, logprobs=True, top_logprobs=3, return_token_ids=True)
    ]
    assert [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]] == content
    assert [i for c in chunks for i in c.get("token_ids", [])] == choice["token_ids"]
    assert chat(server, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_several_choices_are_separate(server: httpx.Client) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 11}
    whole = chat(server, **fields)
    contents, firsts = dict.fromkeys(range(3), ""), {}
    for chunk in streamed(server, **fields):
        (choice,) = chunk["choices"]
        firsts.setdefault(choice["index"], choice["delta"])
        contents[choice["index"]] += choice["delta"].get("content", "")
    assert list(contents.values()) == [choice["message"]["content"] for choice in whole["choices"]]
    assert all(first["role"] == "assistant" for first in firsts.values()) and len(firsts) == 3


def test_prefill_continues_the_last_message(server: httpx.Client) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "2 + 3"}]
    assert (
        chat(server, messages=messages, continue_final_message=True)["choices"][0]["message"][
            "content"
        ]
        == " = 5"
    )


def test_parts_of_text_and_a_developer_are_read(server: httpx.Client) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]}]
    assert chat(server, messages=parts)["choices"] == chat(server)["choices"]
    assert chat(server, messages=[{"role": "system", "content": "Be brief."}, *QUESTION])["choices"]


def test_max_completion_tokens_overrides_max_tokens(server: httpx.Client) -> None:
    answer = chat(server, max_completion_tokens=2)
    assert (
        answer["usage"]["completion_tokens"] == 2
        and answer["choices"][0]["finish_reason"] == "length"
    )


def test_structured_output(server: httpx.Client) -> None:
    wanted = {
        "type": "json_schema",
        "json_schema": {
            "name": "color",
            "strict": True,
            "schema": {"type": "string", "enum": ["red", "green"]},
        },
    }
    assert json.loads(chat(server, response_format=wanted)["choices"][0]["message"]["content"]) in (
        "red",
        "green",
    )
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    compact = {"json": schema, "disable_any_whitespace": True}
    assert isinstance(
        json.loads(chat(server, structured_outputs=compact)["choices"][0]["message"]["content"])[
            "n"
        ],
        int,
    )
    assert (
        chat(server, structured_outputs={"choice": ["yes"]})["choices"][0]["message"]["content"]
        == "yes"
    )


def test_the_service_tier_is_returned_if_requested(server: httpx.Client) -> None:
    assert chat(server, service_tier="auto")[
        "service_tier"
    ] == "default" and "service_tier" not in chat(server)
    assert streamed(server, service_tier="auto")[1]["service_tier"] == "default"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        (
            {"messages": [*QUESTION, {"role": "alien", "content": "x"}]},
            "messages[1].role",
            "invalid_value",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty_array"),
        (
            {"messages": [{"role": "assistant"}]},
            "messages[0].content",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].tool_call_id",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "function", "name": "f", "content": "x"}]},
            "messages[0].role",
            "unsupported_value",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages[0].content[0].type",
            "unsupported_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"messages": QUESTION, "continue_final_message": True},
            "continue_final_message",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": "a " * 5000}]},
            "messages",
            "context_length_exceeded",
        ),
        ({"max_completion_tokens": 10**6}, "messages", "context_length_exceeded"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "tools[0].type",
            "unsupported_value",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": 3}},
                }
            },
            "response_format",
            "invalid_value",
        ),
        ({"modalities": ["audio"]}, "modalities", "unsupported_value"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            "invalid_value",
        ),
        ({"stream": "yes"}, "stream", "invalid_type"),
    ],
)
def test_errors_name_the_field(server: httpx.Client, fields: dict, param: str, code: str) -> None:
    answer = server.post("/v1/chat/completions", json=BODY | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error


def test_ignored_fields_are_listed(server: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi", "mood": "good"}]
    answer = server.post(
        "/v1/chat/completions",
        json=BODY | {"messages": messages, "reasoning_effort": "low", "store": True},
    )
    assert (
        answer.headers["x-ignored-params"] == "store,reasoning_effort"
        and answer.headers["x-unknown-params"] == "messages[0].mood"
    )
    fields = {"documents": [{"text": "x"}], "chat_template_kwargs": {"enable_thinking": False}}
    ignored = server.post("/v1/chat/completions", json=BODY | fields).headers["x-ignored-params"]
    assert ignored == "documents,chat_template_kwargs.enable_thinking"


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose template supports tools and reasoning."""
    path = tmp_path_factory.mktemp("templates") / "tools.jinja"
    path.write_text(TOOL_TEMPLATE)
    with running_server("--chat-template", str(path), "--reasoning-parser", "none") as client:
        yield client


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_call_matches_the_tools_schema(tool_server: httpx.Client, choice: Any) -> None:
    fields = {
        "tools": [TOOL, WEATHER] if choice is NAMED else [WEATHER],
        "tool_choice": choice,
        "max_tokens": 200,
        "parallel_tool_calls": False,
    }
    whole = chat(tool_server, **fields)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert (
        call["function"]["name"] == "weather"
        and arguments["city"] in ("Rome", "Oslo")
        and 1 <= arguments["days"] <= 9
    )
    assert whole["finish_reason"] == "tool_calls" and call["id"].startswith("call_")
    chunks = [c["choices"][0] for c in streamed(tool_server, **fields)]
    deltas = [delta for chunk in chunks for delta in chunk["delta"].get("tool_calls", [])]
    assert [d["function"]["name"] for d in deltas if "id" in d] == ["weather"] and {
        d["index"] for d in deltas
    } == {0}
    assert (
        "".join(d["function"]["arguments"] for d in deltas) == call["function"]["arguments"]
        and len(deltas) > 2
    )
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_a_conversation_with_a_call_continues(tool_server: httpx.Client) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'},
    }
    messages = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert (
        chat(tool_server, messages=messages, tools=[WEATHER])["choices"][0]["message"]["role"]
        == "assistant"
    )
    assert (
        "tool_calls"
        not in chat(tool_server, tools=[WEATHER], tool_choice="none")["choices"][0]["message"]
    )


def test_an_invalid_schema_is_an_error_of_the_tools(tool_server: httpx.Client) -> None:
    bad = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"x": {"type": "nonsense"}}},
        },
    }
    answer = tool_server.post(
        "/v1/chat/completions", json=BODY | {"tools": [bad], "tool_choice": "required"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
