"""/api/chat and /api/generate over HTTP: Ollama's lines, durations, finish reasons, errors, and the
same text as OpenAI's chat.
"""

from datetime import datetime
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
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


@pytest.mark.parametrize(
    ("path", "body", "empty"),
    [
        ("chat", CHAT | {"messages": []}, "message"),
        ("generate", GENERATE | {"prompt": ""}, "response"),
    ],
)
def test_an_empty_prompt_loads_the_model(path: str, body: dict, empty: str) -> None:
    app = scripted_app(ScriptedEngine(["a"]))
    said = post(app, f"/api/{path}", body).json()
    assert (said["done"], said["done_reason"]) == (True, "load") and empty in said
    refusal = post(app, f"/api/{path}", body | {"keep_alive": 0})
    assert refusal.status_code == 400 and "stays loaded" in refusal.json()["error"]


def test_errors_have_ollamas_format_also_inside_a_stream() -> None:
    answer = post(scripted_app(ScriptedEngine([RuntimeError("secret")])), "/api/chat", CHAT)
    assert answer.status_code == 500 and answer.json().keys() == {"error"}
    *_, last = lines(
        post(scripted_app(ScriptedEngine(["a", RuntimeError("secret")])), "/api/chat", CHAT)
    )
    assert last.keys() == {"error"} and "secret" not in last["error"]
    answer = post(scripted_app(ScriptedEngine(["a"])), "/api/chat", CHAT | {"model": "other"})
    assert answer.status_code == 404 and "other" in answer.json()["error"]
    answer = post(scripted_app(ScriptedEngine(["a"])), "/api/generate", {"prompt": "hi"})
    assert answer.status_code == 400 and "model" in answer.json()["error"]


def test_the_same_text_as_openais_chat(server: httpx.Client) -> None:
    chat = server.post(
        "/v1/chat/completions",
        json={"messages": CHAT["messages"], "max_tokens": 16, "temperature": 0},
    ).json()
    text, usage = chat["choices"][0]["message"]["content"], chat["usage"]
    greedy = {"options": {"temperature": 0, "num_predict": 16}}
    said = server.post("/api/chat", json=CHAT | greedy | {"stream": False}).json()
    assert (
        said["message"] == {"role": "assistant", "content": text} and said["done_reason"] == "stop"
    )
    assert (said["prompt_eval_count"], said["eval_count"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert (
        min(said[name] for name in ("total_duration", "prompt_eval_duration", "eval_duration")) > 0
    )
    assert (
        "".join(
            line["message"]["content"]
            for line in lines(server.post("/api/chat", json=CHAT | greedy))
        )
        == text
    )
    assert (
        "".join(
            line["response"] for line in lines(server.post("/api/generate", json=GENERATE | greedy))
        )
        == text
    )


def test_the_same_log_probabilities_as_openais_chat(server: httpx.Client) -> None:
    chat = {
        "messages": CHAT["messages"],
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    told = server.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"][
        "content"
    ]
    body = CHAT | {
        "options": {"temperature": 0, "num_predict": 16},
        "logprobs": True,
        "top_logprobs": 2,
    }
    assert (
        server.post("/api/chat", json=body | {"stream": False}).json()["logprobs"] == told
        and len(told[0]["top_logprobs"]) == 2
    )
    assert [
        one
        for line in lines(server.post("/api/chat", json=body))
        for one in line.get("logprobs", [])
    ] == told
    assert (
        "logprobs"
        not in server.post(
            "/api/chat", json=body | {"stream": False, "logprobs": False, "top_logprobs": None}
        ).json()
    )


def test_a_format(server: httpx.Client) -> None:
    body = CHAT | {
        "format": {"enum": ["four", "five"]},
        "stream": False,
        "options": {"temperature": 0, "num_predict": 16},
    }
    assert server.post("/api/chat", json=body).json()["message"]["content"] in ('"four"', '"five"')
