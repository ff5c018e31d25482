"""Calls with the name before the arguments: DeepSeek's, Kimi's, Mistral's."""

from __future__ import annotations

import pytest
from quire.frontend.answer_format import (
    ParsedAnswer,
    ParsedToolCall,
    ToolCallArguments,
    ToolCallStart,
    detect,
)
from quire.tests.frontend.answer_format.cuts import parse, parse_pieces

V3, V31, KIMI, MISTRAL = (
    detect("", name) for name in ("deepseek_v3", "deepseek_v31", "kimi_k2", "mistral")
)
BEGIN, CALL, SEP, END, CLOSE = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
BOTH = [ParsedToolCall("f", '{"a": "b"}'), ParsedToolCall("g", "{}")]


@pytest.mark.parametrize("answer_format", [V3, V31])
@pytest.mark.parametrize(
    "text",
    [
        f'{BEGIN}{CALL}function{SEP}f\n```json\n{{"a": '
        f'"b"}}\n```{END}\n{CALL}function{SEP}g\n```json\n{{}}\n```{END}{CLOSE}',
        f'{BEGIN}{CALL}f{SEP}{{"a": "b"}}{END}{CALL}g{SEP}{{}}{END}{CLOSE}',
        f'{CALL}f{SEP}{{"a": "b"}}{END}{CALL}g{SEP}{{}}',
    ],
)
def test_deepseek(answer_format, text) -> None:
    assert parse(answer_format, f"Let me see.{text}") == ParsedAnswer("Let me see.", "", BOTH)


@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_kimi_keeps_its_ids(space) -> None:
    """They count on through the conversation."""
    marks, ids = KIMI.tool_format, ["functions.f:3", "functions.g:4"]
    pieces = [marks.start]
    for call, id in zip(BOTH, ids, strict=True):
        pieces += [marks.call_start, id, marks.separator, call.arguments, marks.call_end]
    answer = parse(KIMI, space.join([*pieces, marks.section_end]))
    assert answer == ParsedAnswer(
        "", "", [ParsedToolCall(c.name, c.arguments, i) for c, i in zip(BOTH, ids)]
    )


def test_kimi_ids_of_another_form_or_twice_are_none() -> None:
    marks = KIMI.tool_format
    ids = ["functions.f:0", "functions.f:0", "f:1", "f", "functions.my.f:2"]
    text = "".join(f"{marks.call_start}{i}{marks.separator}{{}}{marks.call_end}" for i in ids)
    assert [(call.name, call.id) for call in parse(KIMI, marks.start + text).tool_calls] == [
        ("f", "functions.f:0"),
        ("f", ""),
        ("f", ""),
        ("f", ""),
        ("my.f", "functions.my.f:2"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "b"}, "id": "abcdefghi"}, {"name": "g", '
        '"arguments": {}}]',
        '[TOOL_CALLS]f{"a": "b"}[TOOL_CALLS]g{}',
        '[TOOL_CALLS]f[ARGS]{"a": "b"}[TOOL_CALLS]g[ARGS]{}',
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "b"}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        '[TOOL_CALLS]{"name": "f", "arguments": {"a": "b"}}[TOOL_CALLS]{"name": "g"}',
    ],
)
def test_mistral(text) -> None:
    assert parse(MISTRAL, text) == ParsedAnswer("", "", BOTH)
    assert parse(MISTRAL, f"Well. {text}") == ParsedAnswer("Well.", "", BOTH)


@pytest.mark.parametrize(
    ("answer_format", "text"),
    [
        (V31, f"{BEGIN} and"),
        (V31, f"{CALL}f{SEP}"),
        (V3, f"{BEGIN}{CALL}function{SEP}f\n``` "),
        (MISTRAL, "[TOOL_CALLS] "),
        (MISTRAL, "[TOOL_CALLS]f x"),
        (V31, CALL + "x" * 300 + SEP + "{}"),
    ],
)
def test_text_that_is_not_a_call_stays_content(answer_format, text) -> None:
    assert parse(answer_format, text) == ParsedAnswer(text, "")


def test_arguments_are_streamed_as_they_arrive() -> None:
    pieces = [BEGIN, CALL, "f", SEP, '{"a": "o', "ne t", 'wo"}', END, CLOSE]
    assert parse_pieces(V31, pieces) == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"a": "o'),
        ToolCallArguments(0, "ne t"),
        ToolCallArguments(0, 'wo"}'),
    ]
