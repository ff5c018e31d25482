"""Tool calls as JSON objects, alone and in lists, and text that is not a call."""

from __future__ import annotations

import json

import pytest
from quire.frontend.answer_format import (
    AnswerFormat,
    Content,
    ParsedAnswer,
    ParsedToolCall,
    ToolCallArguments,
    ToolCallStart,
    detect,
)
from quire.frontend.answer_format.json_calls import JsonCalls
from quire.tests.frontend.answer_format.cuts import TOOLS, parse, parse_pieces

HERMES = detect("<tool_call>")
BARE = AnswerFormat(
    "bare",
    JsonCalls(starts=("<|python_tag|>",), bare_beginnings="{[", bare_separator=";"),
    None,
    None,
)
LIST = AnswerFormat("list", JsonCalls(starts=("<calls>",), end="</calls>"), None, None)


APERTUS, COHERE = detect("", "apertus", "apertus"), detect("", "cohere", "cohere")


@pytest.mark.parametrize(
    ("inner", "calls"),
    [
        ('[{"f": {"a": 1}}]', [("f", '{"a": 1}')]),
        ('[ {"f" : {"a": True, } } , {"g": null}]', [("f", '{"a": true }'), ("g", "{}")]),
        ('{"f": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
    ],
)
def test_calls_by_the_name_as_key(inner, calls) -> None:
    expected = [ParsedToolCall(*call) for call in calls]
    text = f"See.<|tools_prefix|>{inner}<|tools_suffix|>"
    assert parse(APERTUS, text) == ParsedAnswer("See.", "", expected)
    thinking = f"<|inner_prefix|>Hm.<|tools_prefix|>{inner}<|tools_suffix|>"
    assert parse(APERTUS, thinking) == ParsedAnswer("", "Hm.", expected)


@pytest.mark.parametrize(
    "inner",
    ["", "[", "[]", "{}", '{"f"}', '{"f": 1}', '{"f": {"a": 1}, "g": {}}', '{"": {}}', "f"],
)
def test_other_objects_are_content(inner) -> None:
    text = f"See. <|tools_prefix|>{inner}<|tools_suffix|>"
    assert parse(APERTUS, text) == ParsedAnswer(text)


def test_coheres_answer_stands_between_marks() -> None:
    thought = "<|START_THINKING|>Hm.<|END_THINKING|>"
    said = ParsedAnswer("Yes.", "Hm.")
    for tools in (TOOLS, []):
        text = f"{thought}<|START_RESPONSE|>Yes.<|END_RESPONSE|>"
        assert parse(COHERE, text, tools) == said
        assert parse(detect("", "cohere", "cohere_text"), text.replace("RESPONSE", "TEXT")) == said


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
    expected = [ParsedToolCall(*call) for call in calls]
    assert parse(HERMES, f"Let me see.\n<tool_call>{inner}</tool_call>\n") == ParsedAnswer(
        "Let me see.", "", expected
    )
    # for example, if the end mark was a stop token
    assert parse(HERMES, f"<tool_call>{inner}") == ParsedAnswer("", "", expected)


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
    assert parse(HERMES, text) == ParsedAnswer(text, "", [])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r'{"a": "\d+\.txt"}', {"a": r"\d+\.txt"}),
        (r'{"a": "C:\work\x"}', {"a": r"C:\work\x"}),
        (r'{"a": "it\'s", "b\'": 1}', {"a": "it's", "b'": 1}),
        (r'{"a": "\u12, \u00e9, \ud83e\udd16, \ud83e!"}', {"a": "\\u12, é, 🤖, \ufffd!"}),
        ('{"a": "one\ntwo\tthree"}', {"a": "one\ntwo\tthree"}),
        ('{"a": True, "b": [False, None]}', {"a": True, "b": [False, None]}),
        ('{"a": [1, 2,], "b": {"c": 3 ,\n}, }', {"a": [1, 2], "b": {"c": 3}}),
        (json.dumps(r'{"a": "\d", "b": True,}'), {"a": r"\d", "b": True}),  # as a string
        ('""', {}),
    ],
)
@pytest.mark.parametrize(
    "call", ['{"name": "f", "arguments": ARGUMENTS}', '{"arguments": ARGUMENTS, "name": "f",}']
)
def test_what_can_only_be_meant_in_one_way_is_repaired(call, written, meant) -> None:
    text = f"<tool_call>{call.replace('ARGUMENTS', written)}</tool_call>"
    answer = parse(HERMES, text)
    assert (answer.content, [call.name for call in answer.tool_calls]) == ("", ["f"])
    assert json.loads(answer.tool_calls[0].arguments) == meant


@pytest.mark.parametrize(
    "written",
    [
        "NaN",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": 1,, "b": 2}',
        '{"a": tru}',
        '{"a": "say "hi" now"}',
        '{"a": 1 "b": 2}',
        '{"a": (1)}',
        '"Bern"',
        '"[1]"',
        '"{\\"a\\": NaN}"',
        "[1]",
        "5",
        "true",
    ],
)
@pytest.mark.parametrize(
    "call", ['{"name": "f", "arguments": ARGUMENTS}', '{"arguments": ARGUMENTS, "name": "f"}']
)
def test_a_call_without_an_object_stays_content_as_a_whole(call, written) -> None:
    text = f"a <tool_call>{call.replace('ARGUMENTS', written)}</tool_call> b"
    assert parse(HERMES, text) == ParsedAnswer(text, "", [])


@pytest.mark.parametrize(
    "end", ["}</tool_call>", "</tool_call>", "", "}}</tool_call>", "}}\n</tool_call>"]
)
def test_a_closing_bracket_may_be_missing_or_stand_twice(end) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}'
    assert parse(HERMES, text + end) == ParsedAnswer("", "", [ParsedToolCall("f", '{"a": 1}')])


def test_a_call_that_max_tokens_cuts_stays_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    whole = text.index("}}") + 1
    assert [bool(parse(HERMES, text[:end]).tool_calls) for end in range(1, len(text))] == [
        end >= whole for end in range(1, len(text))
    ]
    assert parse(HERMES, f"{text}\n{text[:40]}") == ParsedAnswer(
        f"\n{text[:40]}", "", [ParsedToolCall("f", '{"a": 1}')]
    )


def test_a_call_after_a_broken_one_is_found() -> None:
    text = '<tool_call>{"name" <tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert parse(HERMES, text) == ParsedAnswer(
        '<tool_call>{"name"', "", [ParsedToolCall("g", "{}")]
    )


def streamed(pieces: list[str], **options: bool) -> list[list]:
    """Return the parts that each piece completes."""
    parser = HERMES.parser(TOOLS, **options)
    return [parser.feed(piece) for piece in pieces]


def test_a_call_is_passed_on_when_it_is_whole() -> None:
    text = 'Well.<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
    said = streamed(list(text))
    assert [i for i, parts in enumerate(said) if any(isinstance(p, ToolCallStart) for p in parts)]
    first = next(i for i, parts in enumerate(said) if not set(map(type, parts)) <= {Content})
    assert text[: first + 1].endswith("}}")


def test_a_forced_call_is_passed_on_as_it_arrives() -> None:
    pieces = ['<tool_call>{"name": "f", "arguments": {"a', '": "b', '"}}</tool_call>']
    assert streamed(pieces, calls_are_valid=True) == [
        [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a')],
        [ToolCallArguments(0, '": "b')],
        [ToolCallArguments(0, '"}')],
    ]


def test_arguments_keep_their_pieces() -> None:
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
    assert parse(LIST, text) == ParsedAnswer(
        " done", "", [ParsedToolCall("f", "{}"), ParsedToolCall("g", "{}")]
    )
    assert parse(LIST, text.replace(', {"name": "g"', ", g")).tool_calls == [
        ParsedToolCall("f", "{}")
    ]


def test_calls_without_marks() -> None:
    both = [ParsedToolCall("f", '{"a": 1}'), ParsedToolCall("g", "{}")]
    assert parse(
        BARE, ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    ) == ParsedAnswer("", "", both)
    assert parse(
        BARE, '{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": {}}'
    ) == ParsedAnswer("", "", both)
    assert parse(BARE, '[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]') == ParsedAnswer(
        "", "", both
    )
    assert parse(BARE, 'Now <|python_tag|>{"name": "f", "parameters": {"a": 1}}') == ParsedAnswer(
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
    assert parse(BARE, text) == ParsedAnswer(text, "", [])


@pytest.mark.parametrize("mark", ["<|tool_call|>", "<tool_call>"])
def test_granite_writes_one_of_two_marks(mark) -> None:
    granite = detect("<|tool_call|>")
    text = f'{mark}[{{"name": "f", "arguments": {{"a": 1}}}}, {{"name": "g", "arguments": {{}}}}]'
    assert parse(granite, f"Well. {text}") == ParsedAnswer(
        "Well.", "", [ParsedToolCall("f", '{"a": 1}'), ParsedToolCall("g", "{}")]
    )
