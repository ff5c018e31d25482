"""The answers of every API, whole and streamed, equal the recorded ones in recorded_answers.json.

Two servers are asked: one of the bundled model in float32, since in bfloat16 the next tokens depend
on the processor's instruction set, and one over a scripted engine that reasons and calls a tool.
Ids, times and the cutting of a text into events are left out of a record.
`python -P -m quire.tests.frontend.server.test_recorded_answers` records anew; a commit that needs
it says which answers change, and why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.scripted import (
    WITH_THOUGHT_AND_CALL,
    ScriptedEngine,
    post,
    scripted_app,
)

RECORDS = Path(__file__).parent / "recorded_answers.json"
CLOSE = 2e-3  # of log-probabilities and embeddings, which are not the same bits on every CPU
MAX_NUMBERS = 8  # of a list of numbers that are kept
HEADERS = ("content-type", "x-unknown-params", "x-ignored-params", "retry-after", "allow")
ID = re.compile(
    r"(?i)\b(?:req|chatcmpl|cmpl|msg|resp|rs|fc|fco|ctc|ctco|cmp|conv|call|toolu|chat|generate"
    r"|embd|embed|pool|score|rerank|classify|fp)[-_][0-9a-f]{8,}(?:-\d+)?\b"
)
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:[\d.]+Z")
# Values that differ from run to run, by the name of their field.
VOLATILE = {
    *("created", "created_at", "completed_at", "modified_at", "uptime_s", "signature", "digest"),
    *("total_duration", "prompt_eval_duration", "eval_duration", "cached_tokens", "root"),
    *("cache_read_input_tokens", "obfuscation", "version", "quire", "system_fingerprint"),
}
TEXTS = {"content", "text", "response", "thinking", "delta", "partial_json", "arguments"} | {
    *("reasoning", "reasoning_content"),
}

HI = [{"role": "user", "content": "What is 7 + 8?"}]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "What is 7 + 8?", "name": "ann"},
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": ADD}]
LOOKUP = {"type": "custom", "name": "look", "format": {"type": "grammar", "syntax": "regex"}}
LOOKUP["format"] |= {"definition": "[a-z]+"}
RESPONSES_TOOLS = [
    {"type": "function", **ADD, "strict": True},
    {"type": "namespace", "name": "math", "tools": [{"type": "function", "name": "sub"}]},
    LOOKUP,
    {"type": "web_search"},
]
ANTHROPIC_TOOLS = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
GREEDY = {"temperature": 0, "max_tokens": 10}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TO_MODEL = {"model": "bundled"}
STEPS = [
    {"role": "user", "content": "add 1 and 2"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": "x"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "3"},
    {"role": "developer", "content": [{"type": "input_text", "text": "Go on."}]},
]
BLOCKS = [
    {"role": "user", "content": "add 1 and 2"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": "x"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "3", "is_error": True},
            {"type": "text", "text": "And?"},
        ],
    },
]
OLLAMA = {"options": {"temperature": 0, "num_predict": 10}} | TO_MODEL
TEXT_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}

# path -> bodies. Those of a path that can stream are sent whole and streamed.
STREAMED: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [
        {"prompt": "Once upon a time"} | GREEDY,
        {"prompt": ["Once", "What is"], "n": 2, "seed": 7, "max_tokens": 5},
        {"prompt": "Once", "logprobs": 2, "return_token_ids": True} | GREEDY,
        {"prompt": "Once", "echo": True, "logprobs": 1, "user": "me"} | GREEDY,
        {"prompt": "Once upon", "echo": True, "max_tokens": 0},
        {"prompt": [5, 6, 7], "logprobs": 0, "return_tokens_as_token_ids": True} | GREEDY,
        {"prompt": "Say: ", "stop": [",", "."], "no_such_field": 1} | GREEDY | {"max_tokens": 30},
        {"prompt": "Say: ", "structured_outputs": {"choice": ["red", "blue"]}} | GREEDY,
        {"prompt": "x", "guided_regex": "[0-9]{3}", "truncate_prompt_tokens": 3} | GREEDY,
    ],
    CHAT: [
        {"messages": HI} | GREEDY,
        {"messages": TALK, "n": 2, "metadata": {"a": "b"}, "service_tier": "auto", "seed": 7},
        {"messages": HI, "logprobs": True, "top_logprobs": 2, "return_token_ids": True} | GREEDY,
        {"messages": [*HI, TALK[2]], "continue_final_message": True} | GREEDY,
        {
            "messages": HI,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            },
            "max_completion_tokens": 30,
            "temperature": 0,
        },
        {"messages": HI, "response_format": {"type": "json_object"}, "max_tokens": 3} | GREEDY,
        {"messages": HI, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}} | GREEDY,
    ],
    RESPONSES: [
        {"input": "What is 7 + 8?", "temperature": 0, "max_output_tokens": 16},
        {"input": TALK[1:2], "temperature": 0, "max_output_tokens": 16, "top_logprobs": 2}
        | {"include": ["message.output_text.logprobs"]}
        | {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
        {"input": STEPS[:1], "instructions": "Be short.", "store": False, "temperature": 0}
        | {"max_output_tokens": 30, "text": {"format": TEXT_FORMAT, "verbosity": "low"}}
        | {"reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"}},
        {"input": [], "generate": False},
    ],
    MESSAGES: [
        {"messages": HI, "stop_sequences": ["."]} | GREEDY | TO_MODEL,
        {"messages": TALK[1:], "system": [{"type": "text", "text": "Be short."}]}
        | {"metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        | GREEDY
        | TO_MODEL,
        {"messages": HI, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        | {"max_tokens": 30, "temperature": 0}
        | TO_MODEL,
    ],
    "/api/chat": [
        {"messages": HI} | OLLAMA,
        {"messages": HI, "format": SCHEMA, "logprobs": True, "top_logprobs": 1}
        | {"options": {"temperature": 0, "num_predict": 30, "num_gpu": 1}}
        | TO_MODEL,
        {"messages": [], "keep_alive": 5} | TO_MODEL,
    ],
    "/api/generate": [
        {"prompt": "What is 7 + 8?", "system": "Be short.", "think": False} | OLLAMA,
        {"prompt": "Once upon", "raw": True, "format": "json"} | OLLAMA,
        {"prompt": ""} | TO_MODEL,
        {"prompt": "x", "think": True} | TO_MODEL,
    ],
}
WHOLE: dict[str, list[Any]] = {
    COMPLETIONS: [
        {"prompt": "Once", "best_of": 3, "n": 2, "seed": 3, "prompt_logprobs": 1} | GREEDY,
        {"prompt": "Once", "n": 3, "best_of": 2},
        {"prompt": "Once", "temperature": -1},
        {"prompt": ["a", 3]},
        {"prompt": "a", "max_tokens": 10**6},
        {"prompt": "a", "guided_json": "{", "structured_outputs": {"regex": "a"}},
        {"prompt": "a", "guided_regex": "(("},
        {"prompt": "a", "model": "other"},
        {"prompt": "a", "stream_options": {"include_usage": True}},
        {"prompt": "a", "suffix": "b"},
        b"{",
        [],
    ],
    CHAT: [
        {"messages": HI, "prompt_logprobs": 1, "max_tokens": 1},
        {"messages": []},
        {"messages": HI, "tools": TOOLS},
        {"messages": HI, "top_logprobs": 2},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "function", "content": "x"}]},
        {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        {"messages": HI, "n": 10**4},
        {"messages": HI, "max_tokens": 10**6},
        {"messages": HI, "chat_template_kwargs": {"tools": 1}},
    ],
    RESPONSES: [
        {"input": "hi", "background": True},
        {"input": "hi", "previous_response_id": "resp_0"},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": "hi", "top_logprobs": 30},
        {"input": "hi", "text": {"format": {"type": "xml"}}},
        {"conversation": "conv_0", "input": "hi"},
        {},
    ],
    f"{RESPONSES}/input_tokens": [{"input": STEPS[:1]}],
    f"{RESPONSES}/resp_0/cancel": [{}],
    MESSAGES: [
        {"messages": HI, "max_tokens": 0} | TO_MODEL,
        {"messages": HI, "max_tokens": 4, "tools": ANTHROPIC_TOOLS} | TO_MODEL,
        {"messages": [{"role": "tool", "content": "x"}], "max_tokens": 4} | TO_MODEL,
        {"messages": HI, "max_tokens": 4, "temperature": -1} | TO_MODEL,
        {"messages": HI, "max_tokens": 4, "model": "other"},
    ],
    f"{MESSAGES}/count_tokens": [{"messages": HI, "system": "Be short."} | TO_MODEL],
    "/v1/embeddings": [
        {"input": ["hello", "x"]},
        {"input": [5, 6], "encoding_format": "base64"},
        {"input": [5, "a"]},
        {"input": "a", "dimensions": 3},
    ],
    "/pooling": [{"input": "hello", "task": "token_embed"}, {"input": "a", "task": "classify"}],
    "/classify": [{"input": "a"}],
    "/score": [
        {"text_1": "hello", "text_2": ["hello", "bye"]},
        {"text_1": "a", "data_1": "b", "text_2": "c"},
        {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]},
    ],
    "/rerank": [{"query": "hello", "documents": ["bye", {"text": "hello"}], "top_n": 1}],
    "/v2/rerank": [{"query": "hello", "documents": ["bye", "hello"], "max_tokens_per_doc": 5}],
    "/v2/embed": [
        {"texts": ["hello"], "embedding_types": ["float", "base64"]},
        {"texts": ["hello"], "embedding_types": ["int8"]},
    ],
    "/api/embed": [{"input": ["hello", "x"], "options": {"num_ctx": 5}} | TO_MODEL, {"input": "x"}],
    "/api/embeddings": [{"prompt": "hello"} | TO_MODEL, {"prompt": ""} | TO_MODEL],
    "/api/show": [TO_MODEL, {"name": "other"}],
    "/api/pull": [TO_MODEL, TO_MODEL | {"stream": False}, {"model": "org/other"}],
    "/api/push": [TO_MODEL],
    "/tokenize": [
        {"prompt": "Once upon", "return_token_strs": True},
        {"messages": HI, "add_special_tokens": True},
        {},
    ],
    "/detokenize": [{"tokens": [5, 6, 7]}, {"tokens": [10**6]}],
    "/pause": [None],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "b"}],
    "/v1/engine/trace": [{"steps": 2}],
}
GET = (
    *("/v1/models", "/v1/models?client_version=1", "/v1/models/bundled", "/v1/models/other"),
    *("/api/tags", "/api/ps", "/api/version", "/health", "/health/ready", "/ping", "/version"),
    *("/tokenizer_info", "/v1/engine/state?since=x", "/v1/requests/none", "/is_paused", "/nowhere"),
    *("/v1/responses/resp_0", "/v1/conversations/conv_0", "/v1/chat/completions"),
)
# Asked of the scripted server, whose model thinks, says a sentence and calls `add`.
SCRIPTED: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": HI, "tools": TOOLS, "stream_options": {"include_usage": True}},
        {"messages": HI, "tools": TOOLS, "include_reasoning": False, "parallel_tool_calls": False},
        {"messages": HI, "tools": TOOLS, "tool_choice": {"type": "function", "function": ADD}},
        {"messages": HI, "tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
        {"messages": HI},
    ],
    RESPONSES: [
        {"input": STEPS, "tools": RESPONSES_TOOLS, "tool_choice": "auto"},
        {"input": "add", "tools": RESPONSES_TOOLS[:1], "tool_choice": "required", "user": "me"},
        {"input": "add", "tools": [LOOKUP | {"name": "add"}]},
    ],
    MESSAGES: [
        {"messages": BLOCKS, "tools": ANTHROPIC_TOOLS, "max_tokens": 50} | TO_MODEL,
        {"messages": HI, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}
        | {"max_tokens": 50, "thinking": {"type": "adaptive"}}
        | TO_MODEL,
    ],
    "/api/chat": [
        {
            "messages": [*HI, {"role": "tool", "content": "3", "tool_name": "add"}],
            "tools": TOOLS,
            "think": True,
        }
        | TO_MODEL
    ],
    "/api/generate": [{"prompt": "hi", "think": True} | TO_MODEL],
}
Ask = Callable[[str, str, Any], httpx.Response]


def questions_of(table: dict[str, list[Any]], *, streams: bool) -> Iterator[tuple[str, str, Any]]:
    """(key of the record, path, body)"""
    for path, bodies in table.items():
        for number, body in enumerate(bodies):
            if streams:
                for stream in (False, True):
                    options = {"stream_options": {"include_usage": True}} if number == 0 else {}
                    more = options if stream and path in (COMPLETIONS, CHAT) else {}
                    whole = {k: v for k, v in body.items() if k != "stream_options"}
                    sent = (body | more if stream else whole) | {"stream": stream}
                    kind = "streamed" if stream else "whole"
                    yield f"{path} {number} {kind}", path, sent
            else:
                yield f"{path} {number} other", path, body


def answers(ask: Ask, scripted: Ask) -> dict[str, Any]:
    """All records, by their keys."""
    found = {}
    for streams, table in ((True, STREAMED), (False, WHOLE)):
        for key, path, body in questions_of(table, streams=streams):
            found[key] = record_of(ask("POST", path, body))
    for path in GET:
        found[f"GET {path}"] = record_of(ask("GET", path, None))
    for key, path, body in questions_of(SCRIPTED, streams=True):
        found[f"scripted {key}"] = record_of(scripted("POST", path, body))
    return found


def record_of(answer: httpx.Response) -> dict[str, Any]:
    headers = {name: answer.headers[name] for name in HEADERS if name in answer.headers}
    kind = headers["content-type"]
    if kind.startswith("text/event-stream"):
        body = joined([event_of(block) for block in answer.text.strip().split("\n\n")])
    elif kind.startswith("application/x-ndjson"):
        body = joined([json.loads(line) for line in answer.text.splitlines()])
    else:
        body = answer.json()
    return {"status": answer.status_code, "headers": headers, "body": plain(body)}


def event_of(block: str) -> Any:
    name, _, data = block.rpartition("data: ")
    if data == "[DONE]":
        return data
    event = json.loads(data)
    event.pop("sequence_number", None)
    return {"event": name.strip(), "data": event} if name else event


def joined(events: list[Any]) -> list[Any]:
    """The events with those in one that differ in nothing but a text or a list that grows: how many
    tokens an event has depends on the times of the steps, as does the order of several choices.
    """
    found: list[Any] = []
    for event in sorted(events, key=choice_of):
        both = None if not found else one_of_both(found[-1], event, "")
        if both is None:
            found.append(event)
        else:
            found[-1] = both
    return found


def choice_of(event: Any) -> float:
    """The index of a chunk's choice; what concerns no choice is last."""
    if not isinstance(event, dict) or "choices" not in event:
        return float("inf") if event == "[DONE]" else 0
    return event["choices"][0]["index"] if event["choices"] else float("inf")


def one_of_both(first: Any, second: Any, name: str) -> Any:
    """None if they differ in more."""
    if isinstance(first, dict) and isinstance(second, dict):
        ends = "text" in first and second.get("finish_reason") is not None  # with the last text
        if first.keys() != second.keys() and not ends:
            return None
        both = {key: one_of_both(first[key], second[key], key) for key in first}
        if any((both[key] is None) != (first[key] is None) for key in first):
            return None
        return both | (
            {key: second[key] for key in ("finish_reason", "stop_reason")} if ends else {}
        )
    if name in ("choices", "tool_calls"):
        if len(first) == len(second) == 1 and (both := one_of_both(first[0], second[0], "")):
            return [both]
        return None
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    if name in TEXTS and isinstance(first, str) and isinstance(second, str):
        return first + second
    return first if first == second or name in VOLATILE else None


def plain(value: Any, name: str = "") -> Any:
    """A value without what differs from run to run."""
    if name in VOLATILE and value is not None:
        return f"<{type(value).__name__}>"
    if isinstance(value, dict):
        if "cache_read_input_tokens" in value:  # not counted as input, as in Anthropic's API
            num_cached = value["cache_read_input_tokens"]
            value = value | {"input_tokens": value["input_tokens"] + num_cached}
        if value.get("type") == "message" and value.get("stop_reason", "") is None:
            value = value | {"usage": value["usage"] | {"output_tokens": 1}}  # of the first step
        return {key: plain(item, key) for key, item in value.items()}
    if isinstance(value, list):
        if len(value) > MAX_NUMBERS and all(isinstance(item, int | float) for item in value):
            return [f"{len(value)} numbers", *map(plain, value[:MAX_NUMBERS])]
        return [plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, str):
        text = MOMENT.sub("<moment>", ID.sub(lambda match: f"<{kind_of(match[0])}>", value))
        return text if len(text) < 1000 else f"{len(text)} characters"
    return value


def kind_of(name: str) -> str:
    return re.split("[-_]", name)[0]


def differences(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        if list(found) != list(expected):
            yield f"{path}: keys {list(found)}, recorded {list(expected)}"
        for key in found.keys() & expected.keys():
            yield from differences(found[key], expected[key], f"{path}.{key}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, f"{path}[{i}]")
    elif isinstance(found, float) and isinstance(expected, float):
        if abs(found - expected) > CLOSE:
            yield f"{path}: {found}, recorded {expected}"
    elif type(found) is not type(expected) or found != expected:
        yield f"{path}: {found!r:.300}, recorded {expected!r:.300}"


def asking(client: httpx.Client) -> Ask:
    def ask(method: str, path: str, body: Any) -> httpx.Response:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        return client.request(method, path, content=raw)

    return ask


def asking_scripted() -> Ask:
    engine = ScriptedEngine(list(WITH_THOUGHT_AND_CALL))
    app = scripted_app(engine, model_aliases=["bundled"])
    return lambda method, path, body: post(app, path, body)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with running_server("--dtype", "float32") as client:
        return answers(asking(client), asking_scripted())


RECORDED: dict[str, Any] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def test_every_question_has_a_record(found: dict[str, Any]) -> None:
    assert list(found) == list(RECORDED)


@pytest.mark.parametrize("path", sorted({key.rsplit(" ", 2)[0] for key in RECORDED}))
def test_answers_equal_the_recorded_ones(found: dict[str, Any], path: str) -> None:
    keys = [key for key in RECORDED if key.rsplit(" ", 2)[0] == path]
    problems = [f for key in keys for f in differences(found[key], RECORDED[key], key)]
    assert not problems, "\n".join(problems)


if __name__ == "__main__":
    with running_server("--dtype", "float32") as client:
        records = answers(asking(client), asking_scripted())
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in records.items())
    RECORDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
