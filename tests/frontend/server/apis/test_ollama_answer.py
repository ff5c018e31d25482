"""The answer of /api/chat and /api/generate: Ollama's lines, durations and ends."""

from datetime import datetime
from typing import Any

import httpx2 as httpx
import msgspec
from quire.tests.frontend.server.scripted import (
    WITH_THOUGHT_AND_CALL,
    ScriptedEngine,
    post,
    scripted_app,
)

CHAT = {"model": "bundled", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
GENERATE = {"model": "bundled:latest", "prompt": "What is 2 + 3?"}
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
}
ENDS = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.text.endswith("\n")
    return [msgspec.json.decode(line) for line in answer.text.splitlines()]


def test_a_whole_answer_with_thought_text_and_call() -> None:
    said = post(
        scripted_app(ScriptedEngine(WITH_THOUGHT_AND_CALL)),
        "/api/chat",
        CHAT | TOOLS | {"stream": False},
    ).json()
    message = said["message"]
    assert (message["role"], message["thinking"], message["content"].strip()) == (
        "assistant",
        "Well.",
        "Let me see.",
    )
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert (said["model"], said["done"], said["done_reason"], said["eval_count"]) == (
        "bundled",
        True,
        "stop",
        6,
    )
    assert [said[name] for name in ("total_duration", "prompt_eval_duration", "eval_duration")] == [
        3 * 10**9,
        5 * 10**8,
        15 * 10**8,
    ]
    assert datetime.fromisoformat(said["created_at"]).tzinfo is not None


def test_the_lines_of_a_stream_accumulate_to_the_whole_answer() -> None:
    app = scripted_app(ScriptedEngine(WITH_THOUGHT_AND_CALL))
    whole = post(app, "/api/chat", CHAT | TOOLS | {"stream": False}).json()
    *said, end = lines(post(app, "/api/chat", CHAT | TOOLS))
    assert not any(line["done"] or "done_reason" in line for line in said) and end["message"] == {
        "role": "assistant",
        "content": "",
    }
    for field in ("content", "thinking"):
        assert "".join(line["message"].get(field, "") for line in said) == whole["message"][field]
    (call,) = [call for line in said for call in line["message"].get("tool_calls", [])]
    assert call["function"] == whole["message"]["tool_calls"][0]["function"]
    assert {name: end[name] for name in (*ENDS, "done", "done_reason")} == {
        name: whole[name] for name in (*ENDS, "done", "done_reason")
    }


def test_generate_returns_the_same_in_its_own_format() -> None:
    app = scripted_app(ScriptedEngine(["<think>We", "ll.</think>", "five"], "length"))
    whole = post(app, "/api/generate", GENERATE | {"stream": False}).json()
    assert (whole["response"], whole["thinking"], whole["done_reason"], whole["model"]) == (
        "five",
        "Well.",
        "length",
        "bundled:latest",
    )
    *said, end = lines(post(app, "/api/generate", GENERATE))
    assert [
        "".join(line.get(field, "") for line in said) for field in ("response", "thinking")
    ] == ["five", "Well."]
    assert end["response"] == "" and end["done_reason"] == "length" and end.keys() >= {*ENDS}
    raw = post(app, "/api/generate", GENERATE | {"stream": False, "raw": True}).json()
    assert raw["response"] == "<think>Well.</think>five" and "thinking" not in raw


def test_a_truncated_call_is_not_a_call() -> None:
    said = post(
        scripted_app(ScriptedEngine(WITH_THOUGHT_AND_CALL[:-1], "length")),
        "/api/chat",
        CHAT | TOOLS | {"stream": False},
    ).json()
    assert "tool_calls" not in said["message"] and said["done_reason"] == "length"
