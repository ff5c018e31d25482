"""Harmony: channels, calls, text that breaks off or does not follow the format, grammars."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire import StructuredOutputsParams
from quire.frontend.answer_format import (
    Content,
    ParsedAnswer,
    ParsedToolCall,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    detect,
)
from quire.frontend.answer_format.harmony import BOUNDARIES, CONSTRAIN, MESSAGE
from quire.tests.frontend.answer_format.cuts import TOOLS, parse, parse_pieces
from quire.tests.frontend.answer_format.grammars import accepts, marked_tokenizer
from quire.tests.frontend.answer_format.templates import TEMPLATES

HARMONY = detect("", "harmony")
TOKENS = (*BOUNDARIES, CONSTRAIN, MESSAGE)
THINK = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b"}'
F, G = ParsedToolCall("f", '{"a": "b"}'), ParsedToolCall("g", "{}")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"{THINK}{FINAL}Yes.\n", ParsedAnswer("Yes.\n", "Hm.")),
        (f"{THINK}{FINAL}Yes.<|return|>", ParsedAnswer("Yes.", "Hm.")),
        (f"{THINK}{CALL}", ParsedAnswer("", "Hm.", [F])),
        (f"{THINK}{CALL}<|call|>", ParsedAnswer("", "Hm.", [F])),
        (f"{THINK}{PREAMBLE}{CALL}", ParsedAnswer("Let me see.", "Hm.", [F])),
        (f"{THINK}{THINK}{PREAMBLE}{FINAL}Yes.", ParsedAnswer("Let me see.\nYes.", "Hm.\nHm.")),
        (
            f"{CALL}<|call|><|start|>assistant to=functions.g<|channel|>commentary json"
            "<|message|>{}<|call|>",
            ParsedAnswer("", "", [F, G]),
        ),
        ("Yes.", ParsedAnswer("Yes.")),
        ("", ParsedAnswer()),
        # as models also write it
        (
            f'{THINK} to=functions.f<|channel|>commentary json<|message|>{{"a": "b"}}',
            ParsedAnswer("", "Hm.", [F]),
        ),
        (
            '<|channel|>analysis to=functions.f code<|message|>\n{"a": "b"}\n',
            ParsedAnswer("", "", [F]),
        ),
        (
            '<|channel|>commentary to=f<|constrain|>json<|message|>{"a": "b"}',
            ParsedAnswer("", "", [F]),
        ),
        (
            "<|channel|>commentary to=functions.g <|constrain|>json<|message|><|call|>",
            ParsedAnswer("", "", [G]),
        ),
        (
            f'{THINK}<|channel|>final <|constrain|>json<|message|>{{"a": 1}}',
            ParsedAnswer('{"a": 1}', "Hm."),
        ),
        (f"<|start|>assistant{THINK}<|message|>Yes.", ParsedAnswer("Yes.", "Hm.")),
        (
            "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.",
            ParsedAnswer("Yes.", "Hm."),
        ),
        (
            "<|channel|>analysis<|message|>Hm.\n<|end|>\n<|start|>assistant<|channel|>final<|message|>Yes.",
            ParsedAnswer("Yes.", "Hm.\n"),
        ),
        # messages to nobody who is known
        ("<|channel|>analysis to=python code<|message|>1 + 1", ParsedAnswer("", "1 + 1")),
        ("<|channel|>commentary to=python<|message|>1 + 1", ParsedAnswer("1 + 1")),
    ],
)
def test_messages(text, answer) -> None:
    assert parse(HARMONY, text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|>Yes.", ParsedAnswer("Yes.", "Hm.")),
        (f"{THINK}Yes.", ParsedAnswer("<|start|>assistantYes.", "Hm.")),
        (f"{FINAL}Messages end with <|end|>.", ParsedAnswer("Messages end with <|end|>.")),
        (
            f"{FINAL}They begin with <|start|>, as\n",
            ParsedAnswer("They begin with <|start|>, as\n"),
        ),
        ("<|channel|>final\nYes.", ParsedAnswer("<|channel|>final\nYes.")),
        ("<|channel|>" + "x" * 600, ParsedAnswer("<|channel|>" + "x" * 600)),
        (
            "<|channel|>analysis<|message|>Is <|channel|> a mark?<|end|>",
            ParsedAnswer("", "Is <|channel|> a mark?"),
        ),
        ("<|channel|>commentary to=functions.f<|message|>print(1)", ParsedAnswer("print(1)")),
        (
            '<|channel|>commentary to=functions.f<|message|>{"a": "b"}} end',
            ParsedAnswer("} end", "", [F]),
        ),
        (
            '<|channel|>commentary to=functions.f<|message|>{"a": b}',
            ParsedAnswer('{"a": b}'),
        ),
    ],
)
def test_text_that_does_not_follow_the_format_is_content(text, answer) -> None:
    assert parse(HARMONY, text) == answer


def test_wherever_the_answer_breaks_off() -> None:
    """No mark and no piece of a header is passed on as text. Of a call that breaks off, the
    arguments are.
    """
    text = f"{THINK}{PREAMBLE}{CALL}"
    whole = parse(HARMONY, text)
    for end in range(len(text)):
        if any(text[:end].endswith(mark[:n]) for mark in TOKENS for n in range(1, len(mark))):
            continue  # within a mark, which is one token
        answer = parse(HARMONY, text[:end])
        assert f"{whole.content}\n{F.arguments}".startswith(answer.content), text[:end]
        assert whole.reasoning.startswith(answer.reasoning)
        for call in answer.tool_calls:
            # a call of a function without arguments has no text
            assert call == F or (text[:end].endswith(MESSAGE) and call == ParsedToolCall("f", "{}"))


@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        ("<|start|>assistant", f"{THINK}{FINAL}Yes", ParsedAnswer("Yes", "Hm.")),
        (f"<|start|>assistant{THINK}{FINAL}Ye", "s.", ParsedAnswer("s.")),
        ("<|start|>assistant<|channel|>analysis<|message|>", "Hm.", ParsedAnswer("", "Hm.")),
        ("<|start|>assistant<|channel|>", "analysis<|message|>Hm.", ParsedAnswer("", "Hm.")),
        ("<|start|>user<|message|>Hi<|end|>", "Yes.", ParsedAnswer("Yes.")),
    ],
)
def test_the_prompt_may_hold_the_beginning_of_the_message(prompt, text, answer) -> None:
    assert parse(HARMONY, text, prompt_text=prompt) == answer


def test_disabled_parts_are_content() -> None:
    text = f"{THINK}{CALL}"
    assert parse(HARMONY, text, tools=[]) == ParsedAnswer('{"a": "b"}', "Hm.")
    kept = "<|channel|>analysis<|message|>Hm."
    assert parse(replace(HARMONY, reasoning_marks=None), text) == ParsedAnswer(kept, "", [F])
    only_reasoning = detect(TEMPLATES["harmony"], "none")
    assert parse(only_reasoning, text) == ParsedAnswer('{"a": "b"}', "Hm.")
    assert parse(detect(TEMPLATES["harmony"], "none", "none"), text) == ParsedAnswer(text)


def test_parts_are_streamed_as_they_arrive() -> None:
    pieces = [
        "<|channel|>",
        "analysis",
        MESSAGE,
        "One",
        " two",
        "<|end|>",
        "<|start|>",
        "assistant",
    ]
    pieces += ["<|channel|>", "commentary", " to", "=functions", ".f ", CONSTRAIN, "json", MESSAGE]
    pieces += ['{"a": "o', 'ne"}', "<|call|>", "<|start|>", "assistant", "<|channel|>", "final"]
    assert parse_pieces(HARMONY, [*pieces, MESSAGE, "Three <", "four>"]) == [
        Reasoning("One"),
        Reasoning(" two"),
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"a": "o'),
        ToolCallArguments(0, 'ne"}'),
        Content("Three "),
        Content("<four>"),
    ]


WORDS = ["alpha", "beta ", "\n", " ", "<", "|>", "{", "é", "🤖", "to=f", "<|"]
BODIES = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["analysis", "commentary", "final"]), BODIES), max_size=5)
)
def test_every_text_of_a_message_is_passed_on(messages) -> None:
    messages = [(channel, f"{body}.") for channel, body in messages]
    text = "<|end|><|start|>assistant".join(f"<|channel|>{c}<|message|>{b}" for c, b in messages)
    said = [
        [body for channel, body in messages if (channel == "analysis") is r] for r in (False, True)
    ]
    assert parse(HARMONY, text) == ParsedAnswer(*map("\n".join, said))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([*WORDS, *BOUNDARIES, CONSTRAIN, "assistant"]), max_size=12).map(
        "".join
    )
)
def test_nothing_is_lost_without_a_message(text) -> None:
    assert parse(HARMONY, f"{text}\n.") == ParsedAnswer(f"{text}\n.")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_damaged_answers_are_read_alike_however_they_are_cut(seed) -> None:
    rng, text = (
        random.Random(seed),
        f"{THINK}{PREAMBLE}{CALL}<|call|><|start|>assistant{THINK}{FINAL}Yes.",
    )
    for _ in range(rng.randint(1, 4)):
        begin = rng.randrange(len(text))
        end = min(len(text), begin + rng.randint(0, 20))
        text = text[:begin] + rng.choice(["", text[begin:end] * 2, *BOUNDARIES, "{"]) + text[end:]
    assert all(call.name for call in parse(HARMONY, text).tool_calls)


# ---------------------------------------------------------------- grammars

STRICT = [{**TOOLS[1], "function": {**TOOLS[1]["function"], "strict": True}}, TOOLS[2]]
STRICT[0]["function"]["parameters"] = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 1}},
    "required": ["a"],
}
INTEGER = StructuredOutputsParams(json={"type": "integer"})
ASSISTANT = "<|start|>assistant"


@pytest.mark.parametrize("marks", [(), TOKENS], ids=["as text", "as tokens"])
def test_forced_calls(marks) -> None:
    tokenizer = marked_tokenizer(marks)
    params = detect("", "harmony", tokenizer=tokenizer).forced(
        STRICT, "required", prompt_text=ASSISTANT
    )
    for accepted in (CALL, THINK + CALL, THINK + THINK + CALL):
        assert accepts(tokenizer, params, accepted), accepted
    for refused in (
        "",
        THINK,
        f"{FINAL}Yes.",
        CALL.replace('"b"', '"bb"'),
        CALL.replace(".f", ".h"),
    ):
        assert not accepts(tokenizer, params, refused), refused
    named = detect("", "harmony", tokenizer=tokenizer).forced(STRICT, {"name": "g"})
    assert accepts(tokenizer, named, CALL.replace(".f", ".g").replace('"a": "b"', ""))
    assert not accepts(tokenizer, named, CALL)


@pytest.mark.parametrize("marks", [(), TOKENS], ids=["as text", "as tokens"])
def test_a_structure_is_that_of_the_final_channel(marks) -> None:
    tokenizer = marked_tokenizer(marks)
    answer_format = detect("", "harmony", tokenizer=tokenizer)
    params = answer_format.after_reasoning(INTEGER, ASSISTANT)
    constrained = FINAL.replace("<|message|>", " <|constrain|>json<|message|>")
    for accepted in (f"{FINAL}5", f"{THINK}{FINAL}5", f"{THINK}{constrained}5"):
        assert accepts(tokenizer, params, accepted), accepted
    for refused in ("5", f"{THINK}5", f"{FINAL}five", f"{PREAMBLE}{FINAL}5", CALL):
        assert not accepts(tokenizer, params, refused), refused
    either = answer_format.after_reasoning(INTEGER, ASSISTANT, tools=STRICT)
    assert accepts(tokenizer, either, THINK + CALL) and accepts(tokenizer, either, f"{FINAL}5")
    thinking = answer_format.after_reasoning(INTEGER, f"{ASSISTANT}<|channel|>analysis<|message|>H")
    assert accepts(tokenizer, thinking, f"m.<|end|>{ASSISTANT}{THINK}{FINAL}5")
    assert answer_format.after_reasoning(INTEGER, f"{ASSISTANT}{FINAL}") is INTEGER


@pytest.mark.parametrize("marks", [(), TOKENS], ids=["as text", "as tokens"])
def test_strict_tools(marks) -> None:
    tokenizer = marked_tokenizer(marks)
    params = detect("", "harmony", tokenizer=tokenizer).strict(STRICT, prompt_text=ASSISTANT)
    for accepted in (f"{FINAL}Yes.", f"{THINK}{FINAL}", CALL, THINK + PREAMBLE + CALL):
        assert accepts(tokenizer, params, accepted), accepted
    for refused in ("Yes.", CALL.replace('"b"', '"bb"'), CALL.replace(".f", ".h"), THINK):
        assert not accepts(tokenizer, params, refused), refused
