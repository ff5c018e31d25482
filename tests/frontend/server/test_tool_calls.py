"""Tool calls over HTTP from a model that was not trained for them: the grammar forces the call, and
every API returns the same call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest
from quire.tests.frontend.answer_format.templates import TEMPLATES
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.scripted import ScriptedEngine, named_events, post, scripted_app

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "New York"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA},
    },
    {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    },
]
ASKED = {
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "seed": 7,
    "temperature": 0.7,
    "max_tokens": 200,
    "tools": TOOLS,
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[httpx.Client]:
    path = tmp_path_factory.mktemp("templates") / "hermes.jinja"
    path.write_text(
        TEMPLATES["hermes"].replace("<think>\n", "").replace("\n</think>\n\n", ""), encoding="utf-8"
    )
    with running_server("--chat-template", str(path)) as client:
        yield client


def ask(server: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(server: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """Return the deltas."""
    answer = server.post("/v1/chat/completions", json=ASKED | fields | {"stream": True})
    lines = [
        line.removeprefix("data: ")
        for line in answer.text.splitlines()
        if line.startswith("data: ")
    ]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def called(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_matches_the_schema(server, choice) -> None:
    for seed in range(3):
        choice_made = ask(server, tool_choice=choice, seed=seed, parallel_tool_calls=False)
        message = choice_made["message"]
        assert choice_made["finish_reason"] == "tool_calls" and message["content"] is None
        ((name, arguments),) = called(message)
        assert name in ("get_weather", "get_time") and (
            choice == "required" or name == "get_weather"
        )
        jsonschema.validate(
            json.loads(arguments),
            SCHEMA if name == "get_weather" else {"type": "object", "maxProperties": 0},
        )


def test_streamed_calls_are_the_same_and_arrive_in_pieces(server) -> None:
    whole = called(ask(server, tool_choice=NAMED)["message"])
    choices = streamed(server, tool_choice=NAMED)
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert (
        deltas[0]["function"]["name"] == "get_weather"
        and deltas[0]["id"]
        and deltas[0]["type"] == "function"
    )
    assert {delta["index"] for delta in deltas} == {0}
    pieces = [delta["function"]["arguments"] for delta in deltas]
    assert "".join(pieces) == whole[0][1] and sum(map(bool, pieces)) > 1
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_the_conversation_continues_with_the_tools_answer(server) -> None:
    message = ask(server, tool_choice=NAMED)["message"]
    tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sunny."}
    fields = {
        "messages": [*ASKED["messages"], message, tool],
        "tool_choice": "none",
        "max_tokens": 8,
    }
    choice = ask(server, **fields)
    assert choice["message"]["content"] and not choice["message"].get("tool_calls")


def test_structured_output_does_not_prevent_calls(server) -> None:
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 99, "minimum": 0}},
    }
    message = ask(server, response_format=wanted, tool_choice="auto", parallel_tool_calls=False)[
        "message"
    ]
    assert message.get("tool_calls") or 0 <= json.loads(message["content"]) <= 99
    assert called(ask(server, response_format=wanted, tool_choice=NAMED)["message"])


def test_strict_tools_let_the_model_answer_with_text(server) -> None:
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    answer = server.post("/v1/chat/completions", json=ASKED | {"tools": strict, "max_tokens": 24})
    assert answer.status_code == 200 and "x-ignored-params" not in answer.headers, answer.text
    plain = ask(
        server, tools=[{"type": "function", "function": TOOLS[0]["function"]}], max_tokens=24
    )
    assert answer.json()["choices"][0]["message"]["content"] == plain["message"]["content"]


def test_an_unsupported_schema_is_an_error_of_the_tools(server) -> None:
    odd = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "uniqueItems": True, "contains": {"type": "integer"}}
        },
        "required": ["a"],
    }
    tools = [{"type": "function", "function": {"name": "odd", "parameters": odd}}]
    answer = server.post(
        "/v1/chat/completions", json=ASKED | {"tools": tools, "tool_choice": "required"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools", answer.text


def test_the_same_call_in_every_api(server) -> None:
    """Greedy, whole and streamed."""
    fields = {"temperature": 0, "parallel_tool_calls": False}
    chat = called(ask(server, tool_choice=NAMED, **fields)["message"])
    flat = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather.",
        "parameters": SCHEMA,
    }
    other = {
        "type": "function",
        "name": "get_time",
        "parameters": TOOLS[1]["function"]["parameters"],
    }
    body = {
        "input": ASKED["messages"],
        "tools": [flat, other],
        "tool_choice": {"type": "function", "name": "get_weather"},
    } | fields
    found = [
        server.post("/v1/responses", json=body).json(),
        named_events(server.post("/v1/responses", json=body | {"stream": True}))[-1][1]["response"],
    ]
    assert [
        [(item["name"], item["arguments"]) for item in response["output"]] for response in found
    ] == [chat, chat]

    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in TOOLS
    ]
    tools[0]["description"] = "The weather."
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    body = {
        "messages": ASKED["messages"],
        "max_tokens": 200,
        "tools": tools,
        "tool_choice": choice,
        "temperature": 0,
    }
    (block,) = server.post("/v1/messages", json=body).json()["content"]
    deltas = [
        data["delta"]
        for name, data in named_events(server.post("/v1/messages", json=body | {"stream": True}))
        if name == "content_block_delta"
    ]
    assert "".join(delta["partial_json"] for delta in deltas) == chat[0][1] and block[
        "input"
    ] == json.loads(chat[0][1])


def test_the_other_apis_return_the_call(server) -> None:
    flat = {"name": "get_weather", "parameters": SCHEMA}
    body = {
        "input": "What is the weather?",
        "tools": [{"type": "function", **flat}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    answer = server.post("/v1/responses", json=body).json()
    (item,) = [item for item in answer["output"] if item["type"] == "function_call"]
    jsonschema.validate(json.loads(item["arguments"]), SCHEMA)

    tool = {"name": "get_weather", "input_schema": SCHEMA}
    body = {
        "messages": ASKED["messages"],
        "max_tokens": 200,
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    answer = server.post("/v1/messages", json=body | {"model": "bundled"}).json()
    (block,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    jsonschema.validate(block["input"], SCHEMA)
    assert answer["stop_reason"] == "tool_use"


# ---------------------------------------------------------------- calls that a model writes freely

ADD = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}
FLAT = {"type": "function", "name": "add", "parameters": ADD}
NESTED = {"type": "function", "function": {"name": "add", "parameters": ADD}}
HELLO = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HELLO, "tools": [NESTED]},
    "/v1/responses": {"input": HELLO, "tools": [FLAT], "store": False},
    "/v1/messages": {
        "messages": HELLO,
        "max_tokens": 200,
        "tools": [{"name": "add", "input_schema": ADD}],
    },
    "/api/chat": {"messages": HELLO, "tools": [NESTED]},
}
WRITTEN = r'<tool_call>{"name": "add", "arguments": {"a": "\d\'", "b": [True, 1,],}}</tool_call>'
MEANT = {"a": "\\d'", "b": [True, 1]}


def said(path: str, pieces: list[str], streams: bool, reason: str) -> tuple[str, list[Any], str]:
    """Return (content, arguments of each call, the reason of the end) as the API tells them."""
    app = scripted_app(ScriptedEngine(pieces, reason))
    answer = post(app, path, {"model": "bundled", "stream": streams} | BODIES[path])
    return read_answer(path, answer, streams)


def read_answer(path: str, answer: httpx.Response, streams: bool) -> tuple[str, list[Any], str]:
    assert answer.status_code == 200, answer.text
    if path == "/v1/chat/completions":
        return of_chat(answer, streams)
    if path == "/v1/responses":
        whole = named_events(answer)[-1][1]["response"] if streams else answer.json()
        texts = [item["content"][0]["text"] for item in whole["output"] if "content" in item]
        calls = [json.loads(i["arguments"]) for i in whole["output"] if "arguments" in i]
        return "".join(texts), calls, whole["status"]
    if path == "/v1/messages":
        return of_messages(answer, streams)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    calls = [c for line in lines for c in line["message"].get("tool_calls", ())]
    text = "".join(line["message"]["content"] for line in lines)
    return text, [call["function"]["arguments"] for call in calls], lines[-1]["done_reason"]


def of_chat(answer: httpx.Response, streams: bool) -> tuple[str, list[Any], str]:
    if not streams:
        choice = answer.json()["choices"][0]
        calls = called(choice["message"]) if choice["message"].get("tool_calls") else []
        content = choice["message"]["content"] or ""
        return content, [json.loads(call[1]) for call in calls], choice["finish_reason"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line][:-1]
    choices = [json.loads(line)["choices"][0] for line in lines]
    arguments: dict[int, str] = {}
    for choice in choices:
        for call in choice["delta"].get("tool_calls", ()):
            index = call["index"]
            arguments[index] = arguments.get(index, "") + call["function"]["arguments"]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [json.loads(a) for a in arguments.values()], choices[-1]["finish_reason"]


def of_messages(answer: httpx.Response, streams: bool) -> tuple[str, list[Any], str]:
    if not streams:
        whole = answer.json()
        texts = [block["text"] for block in whole["content"] if block["type"] == "text"]
        calls = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
        return "".join(texts), calls, whole["stop_reason"]
    events = [data for _, data in named_events(answer)]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    kinds = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    json_text = "".join(delta.get("partial_json", "") for delta in deltas)
    calls = [json.loads(json_text)] if "tool_use" in kinds else []
    text = "".join(delta.get("text", "") for delta in deltas)
    return text, calls, events[-2]["delta"]["stop_reason"]


@pytest.mark.sampled
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
def test_arguments_leave_as_an_object_or_not_at_all(path, streams) -> None:
    """Whatever is repaired, broken beyond repair, or cut by max_tokens."""
    for pieces in ([WRITTEN], list(WRITTEN)):
        text, calls, reason = said(path, pieces, streams, "stop")
        assert (text, calls) == ("", [MEANT])
        assert reason in ("tool_calls", "completed", "tool_use", "stop")
    for arguments in ('{"a": NaN}', '{"a": 1,, "b": 2}', '"Bern"', "[1]"):
        broken = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
        text, calls, reason = said(path, list(broken), streams, "stop")
        assert (text, calls) == (broken, [])
        assert reason in ("completed", "end_turn", "stop")
    whole = WRITTEN.index("}}") + 1
    for end in range(len("<tool_call>"), len(WRITTEN), 7):
        text, calls, reason = said(path, list(WRITTEN[:end]), streams, "length")
        if end < whole:
            assert (text, calls) == (WRITTEN[:end], [])
        else:  # the mark at the end may be cut too
            assert calls == [MEANT] and "</tool_call>".startswith(text)
        assert reason in ("length", "incomplete", "max_tokens")


KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_call_keeps_the_id_that_its_model_wrote(streams) -> None:
    app = scripted_app(ScriptedEngine(list(KIMI)), TEMPLATES["kimi_k2"])
    for path in ("/v1/chat/completions", "/v1/responses", "/api/chat"):
        answer = post(app, path, {"model": "bundled", "stream": streams} | BODIES[path])
        assert re.search('"(call_)?id": ?"functions.add:7"', answer.text), answer.text


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        ("/v1/chat/completions", {"tool_choice": "required"}),
        ("/v1/responses", {"tool_choice": "required"}),
        ("/v1/messages", {"tool_choice": {"type": "any"}}),
    ],
)
def test_a_forced_call_that_max_tokens_cuts(path, choice) -> None:
    """OpenAI's APIs stream the arguments as they are written, so they tell how far they came, and
    the reason. Anthropic's has no form for half a call.
    """
    app = scripted_app(ScriptedEngine(list(WRITTEN[:60]), "length"))
    found = post(app, path, {"model": "bundled"} | BODIES[path] | choice).json()
    if path == "/v1/messages":
        assert found["content"] == [{"type": "text", "text": WRITTEN[:60]}]
        assert found["stop_reason"] == "max_tokens"
    elif path == "/v1/responses":
        (item,) = found["output"]
        assert (item["type"], item["status"], found["status"]) == (
            "function_call",
            "incomplete",
            "incomplete",
        )
        assert item["arguments"].startswith('{"a": ')
    else:
        ((_, arguments),) = called(found["choices"][0]["message"])
        assert arguments.startswith('{"a": ') and found["choices"][0]["finish_reason"] == "length"


ENDS = {
    "/v1/chat/completions": "stop",
    "/v1/responses": "completed",
    "/v1/messages": "stop_sequence",
    "/api/chat": "stop",
}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
def test_a_call_that_a_stop_string_cuts_is_no_call(path, streams) -> None:
    """The reason is that of a text, in every API; calls before it are calls."""
    whole = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for before, calls in (("", []), (whole, [{"a": 1}])):
        for end in (len("<tool_call>"), 30, whole.index("1}}")):
            app = scripted_app(ScriptedEngine(list(before + whole[:end]), "stop", "END"))
            answer = post(app, path, {"model": "bundled", "stream": streams} | BODIES[path])
            text, found, reason = read_answer(path, answer, streams)
            assert (text, found) == (whole[:end], calls)
            if not calls:
                assert reason == ENDS[path]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_forced_call_that_a_stop_string_cuts_ends_with_stop(server, streams) -> None:
    """Its arguments are passed on as far as they came, so the reason tells that they are cut."""
    fields = {"tool_choice": NAMED, "temperature": 0, "stop": ['", "days"', '","days"']}
    if streams:
        *_, last = choices = streamed(server, **fields)
        calls = [call for one in choices for call in one["delta"].get("tool_calls", [])]
        arguments = "".join(call["function"]["arguments"] for call in calls)
    else:
        last = ask(server, **fields)
        ((_, arguments),) = called(last["message"])
    assert arguments in ('{"city": "Paris', '{"city": "New York')
    assert last["finish_reason"] == "stop" and last["stop_reason"] in fields["stop"]
    uncut = ask(server, **fields | {"stop": "never written"})
    assert uncut["finish_reason"] == "tool_calls"

    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    body = {"messages": ASKED["messages"], "max_tokens": 200, "temperature": 0, "tools": tools}
    body |= {"tool_choice": {"type": "tool", "name": "get_weather"}, "stream": streams}
    answer = server.post("/v1/messages", json=body | {"stop_sequences": fields["stop"]})
    text, calls, reason = of_messages(answer, streams)
    assert '{"city": "' in text and (calls, reason) == ([], "stop_sequence")


SPECIAL = ["<|im_end|>", "a <|im_start|> b", "<|endoftext|><|im_end|>"]


def only(text: str) -> dict[str, Any]:
    """A schema with the text as the one value, in the name of a property and in a constant."""
    properties = {"x": {"type": "string", "enum": [text]}, text: {"const": text}}
    return {"type": "object", "properties": properties, "required": ["x", text]} | {
        "additionalProperties": False
    }


@pytest.mark.parametrize("text", SPECIAL)
def test_the_text_of_a_special_token_in_a_schema_is_characters(server, text) -> None:
    """In every field and every API that makes a schema a grammar."""
    schema, value = only(text), {"x": text, text: text}
    asked = {"messages": ASKED["messages"], "max_tokens": 200, "temperature": 1.5, "seed": 3}
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    forced = {"type": "function", "function": {"name": "f"}}

    def chat(**fields: Any) -> dict[str, Any]:
        answer = server.post("/v1/chat/completions", json=asked | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    for choice in (forced, "required"):
        message = chat(tools=tools, tool_choice=choice, parallel_tool_calls=False)
        assert [json.loads(arguments) for _, arguments in called(message)] == [value]
    assert json.loads(chat(response_format=wanted)["content"]) == value
    message = chat(response_format=wanted, tools=tools, parallel_tool_calls=False)
    found = [
        json.loads(arguments) for _, arguments in called(message) if message["content"] is None
    ]
    assert (found or [json.loads(message["content"])]) == [value]
    pattern = "".join(f"\\x{{{ord(c):x}}}" for c in text)
    for kind, stated in (
        ("choice", [text]),
        ("regex", pattern),
        ("grammar", f"start: T\nT: {json.dumps(text)}"),
    ):
        assert chat(structured_outputs={kind: stated})["content"] == text
        assert chat(**{f"guided_{kind}": stated})["content"] == text
    assert json.loads(chat(structured_outputs={"json": schema})["content"]) == value

    body = {"input": "Hi.", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    answer = server.post("/v1/responses", json=body | {"parallel_tool_calls": False}).json()
    assert [json.loads(item["arguments"]) for item in answer["output"]] == [value]
    body = {"input": "Hi.", "text": {"format": {"type": "json_schema", **wanted["json_schema"]}}}
    answer = server.post("/v1/responses", json=body).json()
    assert json.loads(answer["output"][0]["content"][0]["text"]) == value
    tool = {"name": "f", "input_schema": schema}
    body = {"messages": ASKED["messages"], "max_tokens": 200, "tools": [tool]}
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    (block,) = server.post("/v1/messages", json=body).json()["content"]
    assert block["input"] == value
    for path, fields in (
        ("/api/chat", {"messages": ASKED["messages"]}),
        ("/api/generate", {"prompt": "Hi."}),
    ):
        body = {"model": "bundled", "format": schema, "stream": False} | fields
        answer = server.post(path, json=body).json()
        written = answer["message"]["content"] if path == "/api/chat" else answer["response"]
        assert json.loads(written) == value


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes"]}, "bad_words"),
        (
            {"structured_outputs": {"regex": "yes"}, "allowed_token_ids": [5]},
            "allowed_token_ids",
        ),
        ({"structured_outputs": {"choice": ["y"]}, "min_tokens": 9}, "min_tokens"),
        ({"structured_outputs": {"grammar": 'start: "a" T\nT: /b/ & /c/'}}, "dead end"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_parameters_that_leave_no_token_are_named(server, fields, names, stream) -> None:
    body = {"prompt": "Hi", "max_tokens": 20, "stream": stream} | fields
    answer = server.post("/v1/completions", json=body)
    lines = answer.text.removeprefix("data: ").splitlines()
    error = next(json.loads(line.removeprefix("data: ")) for line in lines if "error" in line)
    assert error["error"]["param"] == "structured_outputs" and names in error["error"]["message"]
    assert error["error"]["type"] == "invalid_request_error"
    assert answer.status_code == (200 if stream and answer.text.startswith("data: ") else 400)


def test_a_grammar_whose_cost_grows_with_the_text_ends_by_name(server) -> None:
    grammar = 'start: s\ns: s s s | s "a" | "a" | ""'
    (a,) = server.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()[
        "tokens"
    ]
    body = {"prompt": "a", "max_tokens": 1500, "structured_outputs": {"grammar": grammar}}
    answer = server.post("/v1/completions", json=body | {"allowed_token_ids": [a]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "structured_outputs"
    assert "is too complex" in error["message"]
