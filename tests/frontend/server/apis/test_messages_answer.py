"""The answer of /v1/messages: the order and shape of Anthropic's events, and stop reasons."""

import pytest
from quire.tests.frontend.server.scripted import (
    WITH_THOUGHT_AND_CALL,
    ScriptedEngine,
    named_events,
    post,
    scripted_app,
)

URL = "/v1/messages"
BODY = {"max_tokens": 16, "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
TOOLS = [{"name": "add", "input_schema": {"type": "object"}}]


def test_a_whole_answer_with_thought_text_and_call() -> None:
    answer = post(scripted_app(ScriptedEngine(WITH_THOUGHT_AND_CALL)), URL, BODY | {"tools": TOOLS})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    said = answer.json()
    thought, text, call = said["content"]
    assert thought["type"] == "thinking" and thought["thinking"] == "Well." and thought["signature"]
    assert text == {"type": "text", "text": text["text"]} and text["text"].strip() == "Let me see."
    assert call.pop("id").startswith("toolu_") and call == {
        "type": "tool_use",
        "name": "add",
        "input": {"a": 1, "b": 2},
    }
    assert (
        said["type"],
        said["role"],
        said["model"],
        said["stop_reason"],
        said["stop_sequence"],
    ) == (
        "message",
        "assistant",
        "bundled",
        "tool_use",
        None,
    )
    usage = said["usage"]
    assert (
        usage["cache_read_input_tokens"] == 3
        and usage["output_tokens"] == 6
        and usage["input_tokens"] > 3
    )


def test_the_events_of_a_stream_accumulate_to_the_whole_answer() -> None:
    app = scripted_app(ScriptedEngine(WITH_THOUGHT_AND_CALL))
    whole = post(app, URL, BODY | {"tools": TOOLS}).json()
    events = named_events(post(app, URL, BODY | {"tools": TOOLS, "stream": True}))
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    start = events[0][1]["message"]
    assert (
        start["content"] == []
        and start["stop_reason"] is None
        and start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    )
    blocks, texts = [], {}
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(data["content_block"])
        elif name == "content_block_delta":
            delta = data["delta"]
            assert data["index"] == len(blocks) - 1
            texts.setdefault(data["index"], {}).setdefault(delta.pop("type"), []).append(
                delta.popitem()[1]
            )
        else:
            assert name == "content_block_stop" and data["index"] == len(blocks) - 1
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    joined = [{kind: "".join(pieces) for kind, pieces in texts[i].items()} for i in range(3)]
    assert joined == [
        {"thinking_delta": "Well.", "signature_delta": whole["content"][0]["signature"]},
        {"text_delta": whole["content"][1]["text"]},
        {"input_json_delta": '{"a": 1, "b": 2}'},
    ]
    assert events[-2][1] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": whole["usage"],
    }


@pytest.mark.parametrize(
    ("reason", "stop_reason", "told"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_stop_reasons(reason: str, stop_reason: str | None, told: tuple) -> None:
    said = post(scripted_app(ScriptedEngine(["a"], reason, stop_reason)), URL, BODY).json()
    assert (said["stop_reason"], said["stop_sequence"]) == told


def test_a_truncated_call_is_text() -> None:
    said = post(
        scripted_app(ScriptedEngine(WITH_THOUGHT_AND_CALL[:-1], "length")),
        URL,
        BODY | {"tools": TOOLS},
    ).json()
    assert said["stop_reason"] == "max_tokens" and said["content"][-1]["type"] == "text"
