"""Messages by role: their form for the template, and the path of invalid ones."""

import asyncio
from typing import Any

import msgspec
import pytest
from quire.frontend.server.apis.openai_messages import OpenAIMessage, plain_messages
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.http.errors import ApiError

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
    "index": 0,
}


def plain(*messages: dict[str, Any]) -> tuple[list[dict[str, Any]], HttpCall]:
    async def run() -> tuple[list[dict[str, Any]], HttpCall]:
        call = HttpCall("req-1", 0.0, asyncio.current_task())
        return plain_messages(msgspec.convert(list(messages), list[OpenAIMessage]), call), call

    return asyncio.run(run())


def test_a_conversation_is_passed_on_unchanged() -> None:
    said, _ = plain(
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": "three", "reasoning": "1 + 2"},
    )
    assert said == [
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1}'},
                    "id": "call_1",
                }
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "three", "reasoning_content": "1 + 2"},
    ]


def test_a_refusal_counts_as_an_answer_of_the_assistant() -> None:
    assert plain({"role": "assistant", "refusal": "no"})[0] == [
        {"role": "assistant", "content": "no"}
    ]
    assert (
        plain({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})[0][0][
            "content"
        ]
        == "no"
    )


def test_a_cache_breakpoint_is_ignored_and_reported() -> None:
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert plain({"role": "user", "content": [part]})[1].ignored_params == [
        "messages[0].content[0].prompt_cache_breakpoint"
    ]


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        (
            {"role": "function", "name": "f", "content": "x"},
            "messages[1].role",
            "unsupported_value",
        ),
        ({"role": "assistant"}, "messages[1].content", "missing_required_parameter"),
        (
            {"role": "assistant", "function_call": {}},
            "messages[1].function_call",
            "unsupported_value",
        ),
        ({"role": "assistant", "audio": {"id": "x"}}, "messages[1].audio", "unsupported_value"),
        (
            {"role": "assistant", "tool_calls": [CALL, CALL | {"type": "custom"}]},
            "messages[1].tool_calls[1].type",
            "unsupported_value",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "function"}]},
            "messages[1].tool_calls[0].function",
            "missing_required_parameter",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a b", "arguments": "{}"}}]},
            "messages[1].tool_calls[0].function.name",
            "invalid_value",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages[1].content[0].type",
            "unsupported_value",
        ),
        (
            {"role": "user", "content": [{"type": "file", "file": {}}]},
            "messages[1].content[0].type",
            "unsupported_value",
        ),
        (
            {"role": "user", "content": [{"type": "refusal", "refusal": "x"}]},
            "messages[1].content[0].type",
            "unsupported_value",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal"}]},
            "messages[1].content[0].refusal",
            "missing_required_parameter",
        ),
    ],
)
def test_an_error_names_the_path(message: dict, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        plain({"role": "user", "content": "x"}, message)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
