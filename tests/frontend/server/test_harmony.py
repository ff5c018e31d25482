"""An answer of gpt-oss in every chat API, whole and streamed, and what its template is given."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from quire.frontend.answer_format import detect
from quire.tests.frontend.answer_format.grammars import marked_tokenizer
from quire.tests.frontend.answer_format.templates import TEMPLATES
from quire.tests.frontend.server.apis.test_ollama_answer import lines
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.scripted import ScriptedEngine, named_events, post, scripted_app
from quire.tests.tiny_models import save_tiny_model
from tokenizers import AddedToken, Tokenizer

PIECES = [
    "<|channel|>",
    "analysis<|mess",
    "age|>Hm.<|end|><|start|>assistant",
    "<|channel|>commentary<|message|>Let me see.<|end|><|start|>",
    "assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{",
    '"a": 1}',
]
TOLD = ("Hm.", "Let me see.", "add", {"a": 1})  # reasoning, content, and the call
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
HI = {"messages": [{"role": "user", "content": "hi"}], "model": "bundled"}


def of_chat(answer: httpx.Response, stream: bool) -> tuple:
    if not stream:
        message = answer.json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        texts = [message["reasoning_content"], message["content"]]
        return (*texts, call["function"]["name"], json.loads(call["function"]["arguments"]))
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    texts = [
        "".join(delta.get(name) or "" for delta in deltas)
        for name in ("reasoning_content", "content")
    ]
    arguments = "".join(call.get("arguments", "") for call in calls)
    return (*texts, calls[0]["name"], json.loads(arguments))


def of_responses(answer: httpx.Response, stream: bool) -> tuple:
    said = named_events(answer)[-1][1]["response"] if stream else answer.json()
    thought, message, call = said["output"]
    texts = [item["content"][0]["text"] for item in (thought, message)]
    return (*texts, call["name"], json.loads(call["arguments"]))


def of_messages(answer: httpx.Response, stream: bool) -> tuple:
    if not stream:
        thought, text, call = answer.json()["content"]
        return thought["thinking"], text["text"], call["name"], call["input"]
    events = [data for _, data in named_events(answer)]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["thinking", "text", "tool_use"]
    texts = ["", "", ""]
    for event in events:
        if event["type"] == "content_block_delta":
            for key in ("thinking", "text", "partial_json"):
                texts[event["index"]] += event["delta"].get(key, "")
    return texts[0], texts[1], begun[2]["name"], json.loads(texts[2])


def of_ollama(answer: httpx.Response, stream: bool) -> tuple:
    messages = [line["message"] for line in lines(answer)] if stream else [answer.json()["message"]]
    texts = ["".join(m.get(name, "") for m in messages) for name in ("thinking", "content")]
    (call,) = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    return (*texts, call["name"], call["arguments"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/chat/completions", HI | {"tools": TOOLS}, of_chat),
        (
            "/v1/responses",
            {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
            of_responses,
        ),
        (
            "/v1/messages",
            HI | {"max_tokens": 9, "tools": [{"name": "add", "input_schema": SCHEMA}]},
            of_messages,
        ),
        ("/api/chat", HI | {"tools": TOOLS}, of_ollama),
    ],
)
def test_every_api(path: str, body: dict[str, Any], read: Any, stream: bool) -> None:
    app = scripted_app(ScriptedEngine(PIECES), TEMPLATES["harmony"])
    assert read(post(app, path, body | {"stream": stream}), stream) == TOLD


@pytest.mark.parametrize(
    ("asked", "written", "ignored"),
    [
        ({}, "medium", ""),
        ({"reasoning_effort": "low"}, "low", ""),
        ({"reasoning_effort": "high"}, "high", ""),
        ({"reasoning_effort": "none"}, "low", "reasoning_effort"),
        ({"reasoning_effort": "minimal"}, "low", "reasoning_effort"),
        ({"reasoning_effort": "max"}, "high", "reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high", ""),
    ],
)
def test_the_effort_of_chat(asked: dict[str, Any], written: str, ignored: str) -> None:
    engine = ScriptedEngine([""])
    answer = post(scripted_app(engine, TEMPLATES["harmony"]), "/v1/chat/completions", HI | asked)
    assert f"Reasoning: {written}<|end|>" in engine.prompts[0]
    assert answer.headers.get("x-ignored-params", "") == ignored


@pytest.mark.parametrize(
    ("path", "body", "written", "ignored"),
    [
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "high"}}, "high", ""),
        (
            "/v1/responses",
            {"input": "hi", "reasoning": {"effort": "none"}},
            "low",
            "reasoning.effort",
        ),
        (
            "/v1/messages",
            HI | {"max_tokens": 9, "thinking": {"type": "enabled"}},
            "medium",
            "",
        ),
        (
            "/v1/messages",
            HI | {"max_tokens": 9, "thinking": {"type": "disabled"}},
            "medium",
            "thinking",
        ),
        ("/api/chat", HI | {"think": "low"}, "low", ""),
        ("/api/chat", HI | {"think": True}, "medium", ""),
        ("/api/chat", HI | {"think": False}, "medium", "think"),
    ],
)
def test_the_effort_of_other_apis(
    path: str, body: dict[str, Any], written: str, ignored: str
) -> None:
    engine = ScriptedEngine([""])
    answer = post(scripted_app(engine, TEMPLATES["harmony"]), path, body)
    assert answer.status_code == 200, answer.text
    assert f"Reasoning: {written}<|end|>" in engine.prompts[0]
    assert answer.headers.get("x-ignored-params", "") == ignored


def test_the_marks_among_the_tokens() -> None:
    tokenizer = marked_tokenizer(ENDS)
    ends = [i for i, text in tokenizer.added_tokens.items() if text in ENDS[1:]]
    assert detect(TEMPLATES["harmony"], tokenizer=tokenizer).stop_token_ids == ends
    assert detect(TEMPLATES["hermes"], tokenizer=tokenizer).stop_token_ids == []
    engine = ScriptedEngine([""])
    engine.tokenizer = tokenizer
    app = scripted_app(engine, TEMPLATES["harmony"])
    post(app, "/v1/chat/completions", HI | {"stop_token_ids": [3]})
    post(app, "/v1/chat/completions", HI | {"ignore_eos": True})
    assert [params.stop_token_ids for params in engine.params] == [[3, *ends], None]
    assert not any(params.skip_special_tokens for params in engine.params)


# ---------------------------------------------------------------- with a model

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
ENDS = ("<|end|>", "<|return|>", "<|call|>")
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with a random model that has gpt-oss' tokens. `end_id`: the token <|end|>."""
    path = save_tiny_model(tmp_path_factory.mktemp("harmony"))
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    marks = [AddedToken(mark, normalized=False, special=True) for mark in (*MARKS, *ENDS)]
    backend.add_special_tokens(marks)
    backend.save(str(path / "tokenizer.json"))
    end_id, *answer_ends = map(backend.token_to_id, ENDS)
    for name, changes in (
        ("tokenizer_config.json", {"eos_token": ENDS[1], "chat_template": TEMPLATES["harmony"]}),
        ("config.json", {"eos_token_id": answer_ends[0]}),
        ("generation_config.json", {"eos_token_id": answer_ends}),
    ):
        contents = json.loads((path / name).read_text(encoding="utf-8"))
        (path / name).write_text(json.dumps(contents | changes), encoding="utf-8")
    with running_server("--model", str(path)) as client:
        client.end_id = end_id
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_grammars_reach_through_the_channels(server: Any, seed: int) -> None:
    """The model ends each of its thoughts at once, and may have several."""
    bias = {str(server.end_id): 100}
    body = HI | {"seed": seed, "temperature": 1.0, "max_tokens": 1000, "logit_bias": bias}
    body.pop("model")
    schema = {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    said = server.post(
        "/v1/chat/completions", json=body | {"tools": [tool], "tool_choice": "required"}
    ).json()["choices"][0]
    (call,) = said["message"]["tool_calls"]
    assert (said["finish_reason"], said["message"]["content"]) == ("tool_calls", None)
    assert json.loads(call["function"]["arguments"])["a"] in range(10)
    format = {"type": "json_schema", "json_schema": {"name": "digit", "schema": DIGIT}}
    said = server.post("/v1/chat/completions", json=body | {"response_format": format}).json()
    assert said["choices"][0]["finish_reason"] == "stop"
    assert json.loads(said["choices"][0]["message"]["content"]) in range(10)
