"""Calls in Python syntax: Llama's, LFM2's, OLMo's."""

from __future__ import annotations

import json

import pytest
from quire.frontend.answer_format import (
    ParsedAnswer,
    ParsedToolCall,
    ToolCallArguments,
    ToolCallStart,
    detect,
)
from quire.tests.frontend.answer_format.cuts import parse, parse_pieces

LLAMA, LFM, OLMO = (detect("", name) for name in ("pythonic", "lfm2", "olmo3"))
CALLS = "f(a=1, b='x, (y)', c=[1, {\"k\": 'v]'}], d=True, e=None, h=-2.5, i=\"it's\"), g()"
EXPECTED = {
    "a": 1,
    "b": "x, (y)",
    "c": [1, {"k": "v]"}],
    "d": True,
    "e": None,
    "h": -2.5,
    "i": "it's",
}


@pytest.mark.parametrize(
    ("answer_format", "text"),
    [
        (LLAMA, f" [{CALLS}]"),
        (LLAMA, f"<|python_start|>[{CALLS}]<|python_end|>"),
        (LFM, f"<|tool_call_start|>[{CALLS}]<|tool_call_end|>"),
        (
            OLMO,
            "<function_calls>\n"
            + CALLS.replace("), g", ")\ng").replace("True", "true").replace("None", "null")
            + "\n</function_calls>",
        ),
    ],
)
def test_calls(answer_format, text) -> None:
    answer = parse(answer_format, text)
    assert (answer.content, [call.name for call in answer.tool_calls]) == ("", ["f", "g"])
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [EXPECTED, {}]


def test_content_around_calls() -> None:
    assert parse(LFM, "See: <|tool_call_start|>[g()]<|tool_call_end|> Done.") == ParsedAnswer(
        "See: Done.", "", [ParsedToolCall("g", "{}")]
    )
    assert parse(
        LFM, '<|tool_call_start|>[{"name": "g", "arguments": {"a": 1}}]<|tool_call_end|>'
    ) == ParsedAnswer("", "", [ParsedToolCall("g", '{"a": 1}')])


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        "[unknown(a=1)]",
        "[f",
        "[f(1)]",
        "[f(a=b)]",
        "[f(a=(]",
        "[f(a='x",
        "[f(a=)]",
        "[f(a=1)x",
        "[",
        "[]",
        "x [f(a=1)]",
    ],
)
def test_text_that_is_not_a_call_stays_content(text) -> None:
    answer = parse(LLAMA, text)
    if text == "[f(a=1)x":  # the call was complete before the rest arrived
        assert answer == ParsedAnswer("x", "", [ParsedToolCall("f", '{"a": 1}')])
    else:
        assert answer == ParsedAnswer(text, "")


def test_arguments_are_streamed_one_by_one() -> None:
    parts = parse_pieces(LLAMA, ["[f(a=1", ", b=", "'x')", ", g()]"])
    assert parts == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"a": '),
        ToolCallArguments(0, "1"),
        ToolCallArguments(0, ', "b": '),
        ToolCallArguments(0, '"x"'),
        ToolCallArguments(0, "}"),
        ToolCallStart(1, "g"),
        ToolCallArguments(1, "{}"),
    ]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("'a\nb\r\n'", "a\nb\r\n"),
        (r"'\d+\.t'", r"\d+\.t"),
        (r"'it\'s\\\n'", "it's\\\n"),
        ('"x"', "x"),
        ("'\\ud83e!'", "\ufffd!"),
    ],
)
def test_texts_are_repaired(written, meant) -> None:
    (call,) = parse(LFM, f"<|tool_call_start|>[f(a={written})]<|tool_call_end|>").tool_calls
    assert json.loads(call.arguments) == {"a": meant}
