"""/api/chat and /api/generate over HTTP: errors, and the same text as OpenAI's chat."""

import httpx2 as httpx
import pytest
from quire.tests.frontend.server.apis.test_ollama_answer import CHAT, GENERATE, lines
from quire.tests.frontend.server.scripted import (
    ScriptedEngine,
    post,
    scripted_app,
)


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
