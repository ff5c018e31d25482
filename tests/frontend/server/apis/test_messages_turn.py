"""Conversion of Anthropic's bodies to turns: roles, tools, thoughts, results, and refusals that
name the field.
"""

from typing import Any

import msgspec
import pytest
from quire.frontend.server.apis.messages_turn import NAMES, MessagesBody, PromptBody, turn_of
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.bodies import decode
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.http.errors import ApiError, renaming
from quire.frontend.server.state import ServerState
from quire.frontend.server.turns.chat_turn import ChatTurn
from quire.frontend.text.chat_template import render_chat
from quire.tests.frontend.server.scripted import TOOL_TEMPLATE, ScriptedEngine, a_call

STATE = ServerState(ServerConfig(), "scripted", ScriptedEngine([""]))
THINKING_STATE = ServerState(
    ServerConfig(chat_template="{{ enable_thinking }} {{ reasoning_effort }} </think>"),
    "scripted",
    ScriptedEngine([""]),
)
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}


def turn(
    *messages: Any, state: ServerState = STATE, call: HttpCall | None = None, **fields: Any
) -> ChatTurn:
    given = [{"role": "user", "content": "hi"}] if not messages else list(messages)
    body = decode(
        msgspec.json.encode({"max_tokens": 9, "messages": given, **fields}), MessagesBody
    )[0]
    with renaming(NAMES):
        return turn_of(state, call or a_call(), body, "msg_1")


@pytest.mark.parametrize("value", ["cc_version=2.1; cch=abc12;", ""])
def test_the_billing_block_of_claude_code_is_left_out(value: str) -> None:
    """Its value changes, and stands before everything else that could be found in the cache."""
    billing = {"type": "text", "text": f"x-anthropic-billing-header: {value}"}
    brief = {"type": "text", "text": "be brief"}
    system = {"role": "system", "content": "be brief"}
    assert turn(system=[billing, brief]).messages[0] == system
    assert turn(system=[billing]).messages[0]["role"] == "user"
    kept = turn(system=[brief, billing]).messages[0]["content"]
    assert kept == f"be brief\n{billing['text']}"
    more = billing | {"text": billing["text"] + "\nbe brief"}
    assert turn(system=[more]).messages[0]["content"] == more["text"]


def test_a_conversation_with_a_tool() -> None:
    found = turn(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "two"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "let me"},
                CALL,
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "3"}],
                }
            ],
        },
        {"role": "user", "content": "and?"},
        {"role": "user", "content": "well?"},
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
        tools=[TOOL],
    )
    function = {"name": "add", "arguments": {"a": 1}}
    assert found.messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "let me",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "3"},
        {"role": "user", "content": "and?\nwell?"},
    ]
    assert found.tools == [
        {
            "type": "function",
            "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
        }
    ]
    assert found.tool_choice == "auto" and found.parallel_tool_calls and found.add_generation_prompt
    assert "<think>hm</think>" in render_chat(TOOL_TEMPLATE, found.messages, tools=found.tools)


def test_keys_of_tools_keep_the_order_of_the_client() -> None:
    schema = {"z": {}, "a": {}}
    tool = {"strict": True, "input_schema": schema, "type": "custom", "name": "f"}
    [found] = turn(tools=[tool | {"description": None}]).tools or []
    function = found["function"]
    assert list(function.items()) == [("strict", True), ("parameters", schema), ("name", "f")]
    assert list(function["parameters"]) == ["z", "a"]


def test_an_error_of_a_tool_reaches_the_model() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}
    before = {"role": "assistant", "content": [CALL]}
    assert (
        turn(before, {"role": "user", "content": [result | {"content": "no such file"}]}).messages[
            -1
        ]["content"]
        == "Error: no such file"
    )
    assert turn(before, {"role": "user", "content": [result]}).messages[-1]["content"] == "Error: "


def test_a_last_message_of_the_assistant_is_continued() -> None:
    found = turn({"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"})
    assert found.continue_final_message and not found.add_generation_prompt


def test_sampling() -> None:
    found = turn(
        temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END"], max_tokens=100_000
    ).params
    assert (found.temperature, found.top_p, found.top_k, found.stop, found.max_tokens) == (
        0.5,
        0.9,
        3,
        ["END"],
        100_000,
    )
    schema = {"type": "object"}
    assert (
        turn(
            output_config={"format": {"type": "json_schema", "schema": schema}}
        ).params.structured_outputs.json
        == schema
    )


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "add"}, {"name": "add"}),
    ],
)
def test_tool_choices(choice: dict, told: Any) -> None:
    assert turn(tools=[TOOL], tool_choice=choice).tool_choice == told
    assert turn(tools=[TOOL | {"strict": True}], tool_choice=choice).tools[0]["function"]["strict"]
    assert not turn(
        tools=[TOOL], tool_choice=choice | {"disable_parallel_tool_use": True}
    ).parallel_tool_calls


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        (None, {}),
        ({"type": "adaptive"}, {}),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking_is_a_switch_of_the_template(thinking: dict | None, variables: dict) -> None:
    assert turn(state=THINKING_STATE, thinking=thinking).template_variables == variables
    found = turn(state=THINKING_STATE, thinking=thinking, output_config={"effort": "high"})
    assert found.template_variables == variables | {"reasoning_effort": "high"}


def test_ignored_fields_are_reported() -> None:
    call, thinking = a_call(), {"type": "enabled", "budget_tokens": 2000}
    found = turn(
        call=call,
        thinking=thinking,
        output_config={"effort": "high"},
        metadata={"user_id": "me"},
        service_tier="standard_only",
    )
    assert found.template_variables == {}
    assert sorted(call.ignored_params) == [
        "metadata",
        "output_config.effort",
        "thinking",
        "thinking.budget_tokens",
    ]
    call = a_call()
    turn(call=call, thinking={"type": "disabled"})
    assert call.ignored_params == []


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([{"role": "user", "content": [IMAGE]}], {}, "messages[0].content[0].type"),
        (
            [
                {"role": "assistant", "content": [CALL]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [IMAGE]}
                    ],
                },
            ],
            {},
            "messages[1].content[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "nobody"}]}],
            {},
            "messages[0].content[0].tool_use_id",
        ),
        ([{"role": "user", "content": [CALL]}], {}, "messages[0].content[0].type"),
        ([{"role": "robot", "content": "hi"}], {}, "messages[0].role"),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [CALL]}],
            {},
            "messages",
        ),
        ([], {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ([], {"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ([], {"tools": [TOOL, TOOL]}, "tools[1].name"),
        ([], {"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ([], {"tool_choice": {"type": "any"}}, "tool_choice"),
        ([], {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ([], {"tools": [TOOL], "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ([], {"thinking": {"type": "hard"}}, "thinking.type"),
        ([], {"max_tokens": 0}, "max_tokens"),
        ([], {"temperature": -1}, "temperature"),
        ([], {"stop_sequences": ["x"] * 100}, "stop_sequences"),
    ],
)
def test_refusals_name_the_field(messages: list, fields: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        turn(*messages, **fields)
    assert (caught.value.status, caught.value.param) == (400, param) and param.removesuffix(
        ".type"
    ) in caught.value.message


def test_a_conversation_without_messages_is_refused() -> None:
    with pytest.raises(ApiError, match="at least one"):
        turn_of(STATE, a_call(), PromptBody(messages=[]), "msg_1")


def test_a_message_without_text_is_an_empty_one() -> None:
    content = [{"type": "redacted_thinking", "data": "x"}]
    assert turn({"role": "user", "content": content}).messages == [{"role": "user", "content": ""}]
