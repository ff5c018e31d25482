"""Calls as Gemma 4 writes them, whole, nested, damaged and forced."""

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
from quire.tests.frontend.answer_format.cuts import function, parse, parse_pieces
from quire.tests.frontend.answer_format.grammars import accepts, marked_tokenizer

GEMMA = detect("", "gemma4")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{}", {}),
        ('{a:<|"|>x<|"|>}', {"a": "x"}),
        ('{a:<|"|><|"|>,b:-1.5,c:true,d:null}', {"a": "", "b": -1.5, "c": True, "d": None}),
        ('{a:<|"|>say "hi",\n{\\d}<|"|>}', {"a": 'say "hi",\n{\\d}'}),
        ('{a:{b:[<|"|>x<|"|>,{c:1}],d:{}},e:[]}', {"a": {"b": ["x", {"c": 1}], "d": {}}, "e": []}),
        ('{my key:1, <|"|>k:2<|"|> : 2 , }', {"my key": 1, "k:2": 2}),
        ('{"a": "x", "b": [1, "y\\u00e9"]}', {"a": "x", "b": [1, "yé"]}),
        ("{a:True,b:None}", {"a": True, "b": None}),
    ],
)
def test_arguments(written, meant) -> None:
    text = f"Well.<|tool_call>call:f{written}<tool_call|>"
    for end in ("", "<|tool_call>call:my-tool.x{}<tool_call|>", "\n"):
        answer = parse(GEMMA, text + end)
        assert answer.content == "Well."
        assert [call.name for call in answer.tool_calls] == ["f", "my-tool.x"][: 1 + ("my" in end)]
        assert json.loads(answer.tool_calls[0].arguments) == meant


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "f{}",
        "call:{}",
        "call:f",
        "call:f{a}",
        "call:f{a:}",
        "call:f{a:b}",
        "call:f{a:NaN}",
        'call:f{a:<|"|>x',
        'call:f{a:<|"|>x<|"|>',
        "call:f{a:[1}",
        "call:f{a:1 b:2}",
        "call:f{a:" + "[" * 300,
    ],
)
def test_text_that_is_not_a_call_stays_content(inner) -> None:
    text = f"a <|tool_call>{inner}<tool_call|> b"
    assert parse(GEMMA, text) == ParsedAnswer(text)


def test_a_forced_text_is_passed_on_as_it_arrives() -> None:
    pieces = ['<|tool_call>call:f{a:<|"|>one', " two<|", '"|>,n:', "2}<tool_call|>"]
    assert parse_pieces(GEMMA, pieces, calls_are_valid=True) == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, "{"),
        ToolCallArguments(0, '"a": '),
        ToolCallArguments(0, '"'),
        ToolCallArguments(0, "one"),
        ToolCallArguments(0, " two"),
        ToolCallArguments(0, '"'),
        ToolCallArguments(0, ", "),
        ToolCallArguments(0, '"n": '),
        ToolCallArguments(0, "2"),
        ToolCallArguments(0, "}"),
    ]


NESTED = function(
    "f",
    a={"type": "array", "items": {"type": "string"}},
    o={
        "type": "object",
        "properties": {"k": {"type": "string", "enum": ["x", "y"]}, "n": {"type": "integer"}},
        "required": ["k"],
    },
    p={"type": "string", "pattern": "^[ab]+$"},
)


@pytest.mark.parametrize("marks", [(), ('<|"|>', "<|tool_call>", "<tool_call|>")])
def test_the_grammar_writes_texts_between_their_marks(marks) -> None:
    tokenizer = marked_tokenizer(marks)
    params = detect("", "gemma4", tokenizer=tokenizer).forced([NESTED], "required")
    for arguments in (
        "",
        'a:[<|"|>x<|"|>,<|"|><|"|>]',
        'a:[],o:{k:<|"|>y<|"|>,n:2}',
        'o:{k:<|"|>x<|"|>}',
        'p:"ab"',  # as JSON, since no mark may follow a pattern
    ):
        text = f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
        assert accepts(tokenizer, params, text), text
        assert len(parse(GEMMA, text).tool_calls) == 1
    for arguments in ('o:{k:<|"|>z<|"|>}', "o:{n:2}", "a:[1]", "b:1", 'p:"c"'):
        assert not accepts(tokenizer, params, f"<|tool_call>call:f{{{arguments}}}<tool_call|>")


def test_reasoning() -> None:
    gemma = detect("", "gemma4", "gemma4")
    text = "<|channel>thought\nHm.\n<channel|>Yes.<|tool_call>call:g{}<tool_call|>"
    assert parse(gemma, text) == ParsedAnswer("Yes.", "Hm.", [ParsedToolCall("g", "{}")])
    off = "<|turn>model\n<|channel>thought\n<channel|>"
    assert gemma.reasoning_marks.is_closed_at_end_of(off)
    assert parse(gemma, "Yes.", prompt_text=off) == ParsedAnswer("Yes.")
