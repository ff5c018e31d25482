"""The parser as a whole: reasoning, content and calls in one answer, however the text is split;
nothing is lost.
"""

from __future__ import annotations

import json
import time
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.frontend.answer_format import (
    AnswerFormat,
    Content,
    ParsedAnswer,
    ParsedToolCall,
    Reasoning,
    collect,
    detect,
)
from quire.frontend.answer_format.formats import TOOL_FORMATS
from quire.frontend.answer_format.reasoning import ReasoningMarks
from quire.frontend.text.chat_template import render_chat
from quire.tests.frontend.answer_format.cuts import function, parse, parse_pieces
from quire.tests.frontend.answer_format.templates import TEMPLATES

FORMAT = detect("<think> </think> <tool_call>")
WITHOUT_REASONING = replace(FORMAT, reasoning_marks=None)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'


def test_reasoning_then_content_then_calls() -> None:
    text = f"<think>\nHm, <tool_call> it is.\n</think>\n\nI shall look.\n{CALL}\n{CALL}\n"
    calls = [ParsedToolCall("f", '{"a": "b"}')] * 2
    assert parse(FORMAT, text) == ParsedAnswer("I shall look.", "Hm, <tool_call> it is.", calls)


@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        ("", "<think>\n\n</think>\n\nYes", ParsedAnswer("Yes", "")),
        ("…<think>\n", "Hm.\n</think>\n\nYes", ParsedAnswer("Yes", "Hm.")),
        ("…<think>", "<think>\nHm.</think>Yes", ParsedAnswer("Yes", "Hm.")),  # opened twice
        ("…<think>\n", "Hm. It goes on", ParsedAnswer("", "Hm. It goes on")),
        ("…<think>\n\n</think>\n\n", "Yes </think>", ParsedAnswer("Yes </think>", "")),
        ("<think> is a mark\n", "Yes", ParsedAnswer("Yes", "")),
        ("", "It says <think>x</think>", ParsedAnswer("It says <think>x</think>", "")),
        ("", " \n<thin", ParsedAnswer(" \n<thin", "")),
        ("", "", ParsedAnswer("", "")),
    ],
)
def test_where_reasoning_begins_and_ends(prompt, text, answer) -> None:
    assert parse(FORMAT, text, prompt_text=prompt) == answer


QWEN, KIMI = detect("", "qwen3_coder", "think"), detect("", "kimi_k2", "think")
QWEN_CALL = "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"
KIMI_CALLS = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": '
    '"b"}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{"a": "b"}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)


@pytest.mark.parametrize("end", ["", "\n", "</think>", "\n</think>\n\n"])
@pytest.mark.parametrize(
    ("answer_format", "calls", "num_calls"),
    [
        (FORMAT, CALL, 1),
        (QWEN, QWEN_CALL, 1),
        (QWEN, f"{QWEN_CALL}\n{QWEN_CALL}", 2),
        (KIMI, KIMI_CALLS, 2),
    ],
)
def test_calls_may_end_an_answer_within_its_reasoning(answer_format, calls, num_calls, end) -> None:
    before = "Hm, in <tool_call> tags or <|tool_calls_section_begin|>."
    answer = parse(answer_format, f"{before}\n\n{calls}{end}", prompt_text="<think>\n")
    assert (answer.content, answer.reasoning) == ("", before)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("f", '{"a": "b"}')
    ] * num_calls


@pytest.mark.parametrize(
    "reasoning",
    [
        f"Hm.\n{QWEN_CALL}\nOr not.",
        f"Hm.\n{QWEN_CALL}\n{QWEN_CALL[:-20]}",
        QWEN_CALL.replace("=f>", "=unknown>"),
        QWEN_CALL[:-20],
        "<tool_call>",
    ],
)
@pytest.mark.parametrize("after", ["", "</think>\n\nYes", f"</think>\n\n{QWEN_CALL}"])
def test_other_calls_within_reasoning_are_drafts(reasoning, after) -> None:
    answer = parse(QWEN, reasoning + after, prompt_text="<think>\n")
    calls = [ParsedToolCall("f", '{"a": "b"}')] if after.endswith(QWEN_CALL) else []
    assert answer == ParsedAnswer("Yes" if "Yes" in after else "", reasoning, calls)


def test_a_forced_call_follows_the_end_of_the_reasoning() -> None:
    """So do all marks in the reasoning belong to it."""
    text = f"Hm.\n{QWEN_CALL}"
    answer = parse(QWEN, text, prompt_text="<think>\n", calls_are_valid=True)
    assert answer == ParsedAnswer("", text)


def test_disabled_parts_stay_content() -> None:
    text = f"<think>Hm.</think> Yes\n{CALL}"
    assert parse(WITHOUT_REASONING, text, prompt_text="<think>") == ParsedAnswer(
        "<think>Hm.</think> Yes", "", [ParsedToolCall("f", '{"a": "b"}')]
    )
    assert parse(FORMAT, text, tools=[]) == ParsedAnswer(f"Yes\n{CALL}", "Hm.")
    assert parse(detect("plain"), text) == ParsedAnswer(text, "")


def test_only_one_call() -> None:
    assert parse(FORMAT, CALL * 3, parallel_tool_calls=False) == ParsedAnswer(
        "", "", [ParsedToolCall("f", '{"a": "b"}')]
    )


def test_text_is_streamed_at_once() -> None:
    pieces = ["<think>", "One", " two", "</think>", "Three", " <", "four", ">"]
    assert parse_pieces(FORMAT, pieces) == [
        Reasoning("One"),
        Reasoning(" two"),
        Content("Three"),
        Content(" <four"),
        Content(">"),
    ]


COMMON = [
    '{"name": "f", ',
    '"arguments": ',
    '"parameters": ',
    '{"a": 1}',
    "{}",
    "{",
    "}",
    "[",
    "]",
    ",",
    '"x\\n"',
    " ",
    "\n",
    "<",
    "ab",
    "f",
    "g",
    "(",
    ")",
    "a=",
    "'",
    "1",
    ";",
    "text",
    "```json\n",
    "```",
    "\\",
    "null",
    "é",
    "🤖",
]


def texts(answer_format: AnswerFormat) -> st.SearchStrategy[str]:
    """Generate marks of the format and parts of calls in any order, some of them damaged."""
    values = [
        value for value in astuple(answer_format.tool_format) if isinstance(value, (str, tuple))
    ]
    marks = [
        text for value in values for text in ([value] if isinstance(value, str) else value) if text
    ]
    written = [
        json.dumps({"name": "f", "arguments": {"a": "b"}}),
        *(mark[:-1] for mark in marks),
        *(f"{mark}f" for mark in marks),
    ]
    whole = st.sampled_from([*marks, *marks, *COMMON, *written, "<think>", "</think>"])
    return st.lists(whole, max_size=14).map("".join)


@pytest.mark.parametrize("name", dict.fromkeys(row.name for row in TOOL_FORMATS))
@settings(max_examples=15, deadline=None)
@given(data=st.data(), prompt=st.sampled_from(["", "<think>\n"]))
def test_splits_and_invalid_text_do_not_matter(name, data, prompt) -> None:
    answer_format = detect("</think>", name)
    answer = parse(answer_format, data.draw(texts(answer_format)), prompt_text=prompt)
    assert all(call.name for call in answer.tool_calls)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_may_break_off_anywhere(name) -> None:
    """Calls are whole, wherever the answer ends."""
    tools = [function("f", a="string", b="array", c="boolean")]
    tools[0]["function"]["parameters"]["required"] = ["a"]
    values = {"a": "x\\d'", "b": [1, {"k": None}], "c": True}
    template, user = TEMPLATES[name], {"role": "user", "content": "f"}
    call = {"name": "f", "arguments": json.dumps(values)}
    calls = [{"id": f"functions.f:{i}", "type": "function", "function": call} for i in (0, 1)]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    prompt = render_chat(template, [user], tools=tools, add_generation_prompt=True)
    text = render_chat(template, [user, turn], tools=tools).removeprefix(prompt)
    answer_format, most = detect(template), 0
    for end in range(len(text)):
        for pieces in ([text[:end]], list(text[:end]))[: 1 + (end % 16 == 0)]:
            answer = collect(parse_pieces(answer_format, pieces, tools))
            for found in answer.tool_calls:
                assert (found.name, json.loads(found.arguments)) == ("f", values), text[:end]
            most = max(most, len(answer.tool_calls))
    assert most == (2 if answer_format.parallel_calls else 1)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("qwen3_coder", "<function=f><parameter=a>"),
        ("deepseek_v4", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">'),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
        ("lfm2", "<|tool_call_start|>[f(a=["),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "'),
    ],
)
@pytest.mark.parametrize("end", ["", "</parameter></｜DSML｜parameter></arg_value>])x"])
@pytest.mark.parametrize("prompt", ["", "<think>"])
def test_many_broken_calls_are_not_read_over_and_over(name, unit, end, prompt) -> None:
    """The number of characters that are looked at grows with the answer, not with its square."""
    answer_format, counts = detect("", name, "think"), []
    for num_units in (1000, 2000):
        text = unit * num_units + end
        started = time.process_time()
        answer = collect(parse_pieces(answer_format, [text], prompt_text=prompt))
        counts.append(time.process_time() - started)
        assert answer == (ParsedAnswer("", text) if prompt else ParsedAnswer(text))
    assert counts[1] < 3 * counts[0] + 0.5  # four times, if it were the square


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nothing_is_lost(data) -> None:
    """Without reasoning, everything that is not content is white space, marks, keys, and the text
    of the calls.
    """
    text = data.draw(texts(FORMAT))
    answer = collect(parse_pieces(WITHOUT_REASONING, [text]))
    if not answer.tool_calls:
        assert answer.content == text
    said = answer.content + "".join(call.name + call.arguments for call in answer.tool_calls)
    for word in ("1", "é", "🤖", "text", "(", "'", ";"):
        assert said.count(word) >= text.count(word), word


def test_marks_with_a_common_prefix() -> None:
    marks = AnswerFormat(None, None, "x", ReasoningMarks("<a>", "<a/>"))
    assert parse(marks, "<a>x<a>y<a/>z") == ParsedAnswer("z", "x<a>y")
