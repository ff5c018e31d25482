"""Tool calls as JSON objects, alone and in lists, and text that is not a call."""

from __future__ import annotations

import pytest
from quire.frontend.answer_format import (
    Answer,
    AnswerFormat,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    detect,
)
from quire.frontend.answer_format.json_calls import JsonCalls
from quire.tests.frontend.answer_format.cuts import parse, parse_pieces

HERMES = detect("<tool_call>")
BARE = AnswerFormat(
    "bare",
    JsonCalls(starts=("<|python_tag|>",), bare_beginnings="{[", bare_separator=";"),
    None,
    None,
)
LIST = AnswerFormat("list", JsonCalls(starts=("<calls>",), end="</calls>"), None, None)


@pytest.mark.parametrize(
    ("inner", "calls"),
    [
        ('{"name": "f", "arguments": {"a": [1, {"b": null}]}}', [("f", '{"a": [1, {"b": null}]}')]),
        ('\n{"name":"f","arguments":{}}\n', [("f", "{}")]),
        ('{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
        ('{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
        (
            '{"id": "x", "type": "function", "name": "f", "arguments": {"a": 1}, "more": [1]}',
            [("f", '{"a": 1}')],
        ),
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "f", "arguments": null}', [("f", "{}")]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
        (
            '{"name": "ünbekannt", "arguments": {"é": "\\u00e9"}}',
            [("ünbekannt", '{"é": "\\u00e9"}')],
        ),
        (
            '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
    ],
)
def test_calls(inner, calls) -> None:
    expected = [ToolCall(*call) for call in calls]
    assert parse(HERMES, f"Let me see.\n<tool_call>{inner}</tool_call>\n") == Answer(
        "Let me see.", "", expected
    )
    # for example, if the end mark was a stop token
    assert parse(HERMES, f"<tool_call>{inner}") == Answer("", "", expected)


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "f(1)",
        "{}",
        '{"name": 5}',
        '{"name": "f", "argum',
        '{"arguments": {}}',
        "[]",
        '{"name": "f", "arguments": tru}',
    ],
)
def test_text_that_is_not_a_call_stays_content(inner) -> None:
    text = f"a <tool_call>{inner}</tool_call> b"
    assert parse(HERMES, text) == Answer(text, "", [])


def test_a_broken_call_loses_no_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call>'
    assert parse(HERMES, text) == Answer(', "b": 2}}</tool_call>', "", [ToolCall("f", '{"a": 1,')])
    # truncated by max_tokens
    assert parse(HERMES, text[:44]) == Answer("", "", [ToolCall("f", '{"a": ')])


def test_a_call_after_a_broken_one_is_found() -> None:
    text = '<tool_call>{"name" <tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert parse(HERMES, text) == Answer('<tool_call>{"name"', "", [ToolCall("g", "{}")])


def test_arguments_are_streamed_as_they_arrive() -> None:
    pieces = [
        "<tool",
        '_call>{"name": "f", ',
        '"arguments": {"te',
        'xt": "one ',
        'two"',
        "}}</tool_call>",
        '<tool_call>{"name": "g"',
        "}</tool_call>",
    ]
    assert parse_pieces(HERMES, pieces) == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"te'),
        ToolCallArguments(0, 'xt": "one '),
        ToolCallArguments(0, 'two"'),
        ToolCallArguments(0, "}"),
        ToolCallStart(1, "g"),
        ToolCallArguments(1, "{}"),
    ]


def test_a_list_between_marks() -> None:
    text = '<calls>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</calls> done'
    assert parse(LIST, text) == Answer(" done", "", [ToolCall("f", "{}"), ToolCall("g", "{}")])
    assert parse(LIST, text.replace(', {"name": "g"', ", g")).tool_calls == [ToolCall("f", "{}")]


def test_calls_without_marks() -> None:
    both = [ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")]
    assert parse(
        BARE, ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    ) == Answer("", "", both)
    assert parse(
        BARE, '{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": {}}'
    ) == Answer("", "", both)
    assert parse(BARE, '[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]') == Answer(
        "", "", both
    )
    assert parse(BARE, 'Now <|python_tag|>{"name": "f", "parameters": {"a": 1}}') == Answer(
        "Now", "", both[:1]
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob"}',
        "[1, 2]",
        "{",
        ' {"a": 1}',
        'Say {"name": "f", "parameters": {}}',
        "[INST]",
    ],
)
def test_json_that_is_not_a_call_is_content(text) -> None:
    assert parse(BARE, text) == Answer(text, "", [])
