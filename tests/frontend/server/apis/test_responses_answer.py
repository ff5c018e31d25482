"""The answer of /v1/responses: OpenAI's events in order, which accumulate to the whole answer; ends
of every kind.
"""

from typing import Any

import httpx2 as httpx
import pytest
from quire.tests.frontend.server.scripted import (
    WITH_THOUGHT_AND_CALL,
    ScriptedEngine,
    named_events,
    post,
    scripted_app,
)

URL = "/v1/responses"
BODY = {
    "input": "What is 2 + 3?",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
}


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_ids(inner)
            for key, inner in value.items()
            if key not in ("id", "item_id", "call_id", "created_at", "completed_at")
        }
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


def test_a_whole_answer_with_thought_text_and_call() -> None:
    said = post(scripted_app(ScriptedEngine(WITH_THOUGHT_AND_CALL)), URL, BODY).json()
    thought, message, call = said["output"]
    assert (thought["type"], thought["content"], thought["summary"]) == (
        "reasoning",
        [{"type": "reasoning_text", "text": "Well."}],
        [],
    )
    assert (
        message["role"] == "assistant"
        and message["content"][0].pop("text").strip() == "Let me see."
    )
    assert message["content"] == [{"type": "output_text", "annotations": [], "logprobs": []}]
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call",
        "add",
        '{"a": 1, "b": 2}',
    ) and call["call_id"].startswith("call_")
    assert {item["status"] for item in said["output"]} == {"completed"} and len(
        {item["id"] for item in said["output"]}
    ) == 3
    assert (
        said["object"],
        said["status"],
        said["error"],
        said["incomplete_details"],
        said["tool_choice"],
    ) == ("response", "completed", None, None, "auto")
    usage = said["usage"]
    assert (
        usage["total_tokens"] == usage["input_tokens"] + 6
        and usage["input_tokens_details"]["cached_tokens"] == 3
    )


def test_the_ordered_events_accumulate_to_the_whole_answer() -> None:
    app = scripted_app(ScriptedEngine(WITH_THOUGHT_AND_CALL))
    whole = post(app, URL, BODY).json()
    events = named_events(post(app, URL, BODY | {"stream": True}))
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in events]
    once = [name for i, name in enumerate(names) if name != (names[i - 1] if i else None)]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    added = [data["item"] for name, data in events if name == "response.output_item.added"]
    assert [item["id"] for item in done] == [item["id"] for item in added] and {
        item["status"] for item in added
    } == {"in_progress"}
    assert added[1]["content"] == [] and added[2]["arguments"] == ""
    assert events[-1][1]["response"]["output"] == done and without_ids(done) == without_ids(
        whole["output"]
    )
    assert without_ids(events[-1][1]["response"]) == without_ids(whole)
    assert (
        events[0][1]["response"]["output"] == []
        and events[0][1]["response"]["status"] == "in_progress"
    )
    for name, text in (
        ("reasoning_text", "Well."),
        ("output_text", done[1]["content"][0]["text"]),
        ("function_call_arguments", done[2]["arguments"]),
    ):
        deltas = [data for kind, data in events if kind == f"response.{name}.delta"]
        assert (
            "".join(data["delta"] for data in deltas) == text
            and len({data["item_id"] for data in deltas}) == 1
        )


def test_a_truncated_answer() -> None:
    app = scripted_app(ScriptedEngine(WITH_THOUGHT_AND_CALL[:-1], "length"))
    whole = post(app, URL, BODY).json()
    assert (whole["status"], whole["incomplete_details"], whole["completed_at"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
        None,
    )
    assert [(item["type"], item["status"]) for item in whole["output"]] == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]
    events = named_events(post(app, URL, BODY | {"stream": True}))
    assert events[-1][0] == "response.incomplete" and without_ids(
        events[-1][1]["response"]
    ) == without_ids(whole)


def test_an_empty_answer_is_an_empty_message() -> None:
    app = scripted_app(ScriptedEngine([""]))
    (item,) = post(app, URL, BODY).json()["output"]
    assert item["type"] == "message" and item["content"][0]["text"] == ""
    names = [name for name, _ in named_events(post(app, URL, BODY | {"stream": True}))]
    assert (
        names.count("response.output_item.added") == names.count("response.output_item.done") == 1
    )


def test_a_failure_before_the_stream_is_a_plain_answer_and_inside_it_the_last_event() -> None:
    answer = post(
        scripted_app(ScriptedEngine([RuntimeError("secret")])), URL, BODY | {"stream": True}
    )
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    events = named_events(
        post(
            scripted_app(ScriptedEngine(["a", RuntimeError("secret")])),
            URL,
            BODY | {"stream": True},
        )
    )
    name, data = events[-1]
    assert name == "response.failed" and data["sequence_number"] == len(events) - 1
    response = data["response"]
    assert (
        response["status"] == "failed"
        and response["error"]["code"] == "server_error"
        and "secret" not in str(events)
    )


@pytest.mark.parametrize(
    ("fields", "echoed"),
    [
        (
            {},
            {
                "text": {"format": {"type": "text"}, "verbosity": "medium"},
                "truncation": "disabled",
                "metadata": {},
                "store": True,
            },
        ),
        (
            {"store": False, "metadata": {"a": "b"}, "user": "me"},
            {"store": False, "metadata": {"a": "b"}, "user": "me"},
        ),
        (
            {"max_output_tokens": 5, "temperature": 0.5},
            {"max_output_tokens": 5, "temperature": 0.5},
        ),
        (
            {"tool_choice": {"type": "function", "name": "add"}},
            {"tool_choice": {"type": "function", "name": "add"}},
        ),
        (
            {"instructions": "be brief", "reasoning": {"effort": "low"}},
            {"instructions": "be brief", "reasoning": {"effort": "low", "summary": None}},
        ),
    ],
)
def test_request_parameters_are_echoed(fields: dict, echoed: dict) -> None:
    answer: httpx.Response = post(scripted_app(ScriptedEngine(["a"])), URL, BODY | fields)
    said = answer.json()
    assert {
        name: said[name] for name in echoed
    } == echoed and "x-unknown-params" not in answer.headers


NAMESPACE = {
    "type": "namespace",
    "name": "team",
    "description": "Agents.",
    "tools": [
        {"type": "function", "name": "add", "parameters": {"type": "object"}},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
    ],
}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_namespaces_and_custom_tools_go_back_as_what_the_client_sent(
    stream: bool,
) -> None:
    texts = [
        '<tool_call>{"name": "team__add", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "team__patch", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>',
    ]
    body = {"input": "Go.", "tools": [NAMESPACE], "stream": stream}
    engine = ScriptedEngine(texts)
    answer = post(scripted_app(engine), URL, body)
    assert answer.status_code == 200 and "team__patch" in engine.prompts[0]
    said = named_events(answer)[-1][1]["response"] if stream else answer.json()
    assert [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in said["output"]
    ] == [
        {
            "type": "function_call",
            "name": "add",
            "namespace": "team",
            "arguments": '{"a": 1}',
            "status": "completed",
        },
        {
            "type": "custom_tool_call",
            "name": "patch",
            "namespace": "team",
            "input": 'a\n"b"',
            "status": "completed",
        },
    ]
    assert said["tools"] == [NAMESPACE]
    if stream:
        told = [(n, d) for n, d in named_events(answer) if "custom_tool_call_input" in n]
        assert [n.rpartition(".")[2] for n, _ in told] == ["delta", "done"]
        assert told[0][1]["delta"] == told[1][1]["input"] == 'a\n"b"'
        arguments = [d for n, d in named_events(answer) if n.endswith("arguments.delta")]
        assert "".join(d["delta"] for d in arguments) == '{"a": 1}'
