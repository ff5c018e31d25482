"""Conversion of OpenAI's Responses bodies to turns: items of every kind, tools, formats, and
refusals that name the field.
"""

from typing import Any

import msgspec
import pytest
from quire.frontend.server.apis.responses_items import items_of
from quire.frontend.server.apis.responses_tools import checked_tools
from quire.frontend.server.apis.responses_turn import (
    LOGPROBS,
    NAMES,
    ResponsesBody,
    check_body,
    turn_of,
)
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.bodies import decode
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.http.errors import ApiError, renaming
from quire.frontend.server.state import ServerState
from quire.frontend.server.turns.chat_turn import ChatTurn
from quire.ipc.params import RequestOutputKind
from quire.tests.frontend.server.scripted import ScriptedEngine, a_call

STATE = ServerState(ServerConfig(), "scripted", ScriptedEngine([""]))
THINKING_STATE = ServerState(
    ServerConfig(chat_template="{{ enable_thinking }} {{ reasoning_effort }} </think>"),
    "scripted",
    ScriptedEngine([""]),
)
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object"},
    "strict": True,
}
IN_CHAT = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object"},
        "strict": True,
    },
}
CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}


def turn(
    input: Any = "hi", state: ServerState = STATE, call: HttpCall | None = None, **fields: Any
) -> ChatTurn:
    body, _ = decode(msgspec.json.encode({"input": input, **fields}), ResponsesBody)
    check_body(body)
    with renaming(NAMES):
        tools = checked_tools(body.tools, body.tool_choice)
        items = items_of(body.input)
        return turn_of(state, call or a_call(), body, "resp_1", tools, items, 0)


def test_text_is_a_message_of_the_user() -> None:
    assert turn("hi", instructions="be brief").messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_a_conversation_with_a_tool() -> None:
    found = turn(
        [
            {"role": "developer", "content": "in verse"},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "one"},
                    {"type": "input_text", "text": "two"},
                ],
            },
            THOUGHT,
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "let me", "annotations": []}],
            },
            CALL,
            CALL | {"call_id": "call_2"},
            RESULT,
            RESULT | {"call_id": "call_2", "output": [{"type": "input_text", "text": "4"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no more"}]},
        ],
        instructions="be brief",
        tools=[TOOL],
    )
    function = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": f"call_{i}", "type": "function", "function": function} for i in (1, 2)]
    assert found.messages == [
        {"role": "system", "content": "be brief\nin verse"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "let me", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "tool", "tool_call_id": "call_2", "content": "4"},
        {"role": "assistant", "content": "no more"},
    ]
    assert found.tools == [IN_CHAT] and found.tool_choice == "auto"


def test_sampling() -> None:
    found = turn(temperature=0.5, top_p=0.9, max_output_tokens=7, seed=3, top_k=5)
    params = found.params
    assert (
        params.temperature,
        params.top_p,
        params.max_tokens,
        params.seed,
        params.top_k,
        found.max_tokens,
    ) == (0.5, 0.9, 7, 3, 5, 7)
    assert params.logprobs is None and params.output_kind == RequestOutputKind.FINAL_ONLY
    assert turn(stream=True).params.output_kind == RequestOutputKind.DELTA
    assert (
        turn(include=[LOGPROBS]).params.logprobs == 0 and turn(top_logprobs=2).params.logprobs == 2
    )


def test_formats() -> None:
    assert turn(text={"format": {"type": "text"}}).params.structured_outputs is None
    assert turn(text={"format": {"type": "json_object"}}).params.structured_outputs.json_object
    schema = {"type": "object"}
    assert (
        turn(
            text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
        ).params.structured_outputs.json
        == schema
    )


@pytest.mark.parametrize(
    ("choice", "told", "num_tools"),
    [
        (None, "auto", 2),
        ("none", "none", 2),
        ("required", "required", 2),
        ({"type": "function", "name": "sub"}, {"name": "sub"}, 2),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "sub"}],
            },
            "required",
            1,
        ),
    ],
)
def test_tool_choices(choice: Any, told: Any, num_tools: int) -> None:
    found = turn(
        tools=[TOOL, TOOL | {"name": "sub"}], tool_choice=choice, parallel_tool_calls=False
    )
    assert (
        found.tool_choice == told
        and len(found.tools) == num_tools
        and not found.parallel_tool_calls
    )


def test_effort_is_a_variable_of_the_template() -> None:
    state = THINKING_STATE
    assert turn(state=state, reasoning={"effort": "low"}).template_variables == {
        "enable_thinking": True,
        "reasoning_effort": "low",
    }
    assert (
        turn(state=state, reasoning={"effort": "none"}).template_variables["enable_thinking"]
        is False
    )
    assert turn(state=state).template_variables == {}


def test_ignored_fields_are_reported() -> None:
    call = a_call()
    turn(
        call=call,
        tools=[TOOL],
        user="me",
        prompt_cache_key="k",
        service_tier="flex",
        max_tool_calls=1,
        text={"verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        stream_options={"include_obfuscation": True},
    )
    assert sorted(call.ignored_params) == [
        "max_tool_calls",
        "prompt_cache_key",
        "reasoning.effort",
        "reasoning.summary",
        "service_tier",
        "stream_options.include_obfuscation",
        "text.verbosity",
        "user",
    ]


@pytest.mark.parametrize(
    ("input", "fields", "param"),
    [
        (None, {}, "input"),
        ([], {}, "input"),
        ([{"role": "robot", "content": "hi"}], {}, "input[0].role"),
        ([{"role": "user"}], {}, "input[0].content"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            {},
            "input[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "input_text"}]}], {}, "input[0].content[0].text"),
        ([{"type": "computer_call"}], {}, "input[0].type"),
        ([CALL | {"arguments": "{"}], {}, "input[0].arguments"),
        ([{"type": "function_call", "name": "add", "arguments": "{}"}], {}, "input[0].call_id"),
        ([RESULT], {}, "input[0].call_id"),
        ([CALL, {"type": "function_call_output", "call_id": "call_1"}], {}, "input[1].output"),
        ("hi", {"background": True}, "background"),
        ("hi", {"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ("hi", {"prompt": {"id": "x"}}, "prompt"),
        ("hi", {"truncation": "hard"}, "truncation"),
        ("hi", {"include": ["everything"]}, "include"),
        ("hi", {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ("hi", {"tools": [{"type": "function"}]}, "tools[0].name"),
        ("hi", {"tools": [TOOL, TOOL]}, "tools[1].name"),
        ("hi", {"tool_choice": "required"}, "tool_choice"),
        ("hi", {"tool_choice": "maybe"}, "tool_choice"),
        (
            "hi",
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}},
            "tool_choice.name",
        ),
        ("hi", {"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            "hi",
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
            },
            "tool_choice.tools",
        ),
        ("hi", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ("hi", {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ("hi", {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ("hi", {"max_output_tokens": 0}, "max_output_tokens"),
        ("hi", {"top_p": 2}, "top_p"),
    ],
)
def test_refusals_name_the_field(input: Any, fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        turn(input, **fields)
    assert (caught.value.status, caught.value.param) == (400, param) and param.removesuffix(
        ".type"
    ) in caught.value.message
