"""MiniMax M3's calls: elements within elements, whose meaning the tools' schemas decide."""

from __future__ import annotations

import json

import pytest
from quire.frontend.answer_format import ParsedAnswer, ParsedToolCall, detect
from quire.tests.frontend.answer_format.cuts import function, parse
from quire.tests.frontend.answer_format.grammars import accepts, marked_tokenizer

N = "]<]minimax[>["
M3 = detect("", "minimax_m3", "minimax_m3")
ITEM = {
    "type": "object",
    "properties": {"sku": {"type": "string"}, "qty": {"type": "integer"}},
    "required": ["sku", "qty"],
}
ORDER = function(
    "order",
    user="integer",
    note="string",
    shipping={"$ref": "#/$defs/Place"},
    items={"type": "array", "items": ITEM},
    sizes={"type": "array", "items": {"type": "number"}},
    gift="boolean",
)
ORDER["function"]["parameters"] |= {
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "item": {"type": "integer"}},
        }
    },
    "required": ["user"],
}
TOOLS = [ORDER, function("now")]


def element(key: str, *inside: str) -> str:
    return f"{N}<{key}>{''.join(inside)}{N}</{key}>"


def call(name: str, *arguments: str) -> str:
    return f'{N}<invoke name="{name}">{"".join(arguments)}{N}</invoke>\n'


def section(*calls: str) -> str:
    return f"{N}<tool_call>\n{''.join(calls)}{N}</tool_call>"


def read(*arguments: str) -> dict:
    answer = parse(M3, section(call("order", *arguments)), TOOLS)
    assert answer.content == "" and len(answer.tool_calls) == 1
    return json.loads(answer.tool_calls[0].arguments)


def test_objects_and_arrays() -> None:
    book, pen = (
        element("item", element("sku", name), element("qty", count))
        for name, count in (("book", "2"), ("018", "5"))
    )
    assert read(
        element("user", "42"),
        element("note", " a\n<b> "),
        element("shipping", element("city", "Rome\n"), element("item", "7")),
        element("items", book, pen),
        element("sizes", element("item", "1"), element("item", "2.5")),
        element("gift", "true"),
    ) == {
        "user": 42,
        "note": " a\n<b> ",
        "shipping": {"city": "Rome\n", "item": 7},
        "items": [{"sku": "book", "qty": 2}, {"sku": "018", "qty": 5}],
        "sizes": [1, 2.5],
        "gift": True,
    }


def test_values_that_are_empty_json_or_unknown() -> None:
    assert read(element("items"), element("sizes", "[1, 2]"), element("shipping", "\n")) == {
        "items": [],
        "sizes": [1, 2],
        "shipping": {},
    }
    found = read(
        element("other", element("a", "1"), element("a", "x")),
        element("list", element("item", "1"), element("item", element("k", "v"))),
    )
    assert found == {"other": {"a": [1, "x"]}, "list": [1, {"k": "v"}]}


def test_whitespace_between_tags() -> None:
    text = section(call("order", "\n  ", element("user", "\n 1 \n"), "\n", element("note", "x")))
    loose = text.replace(f"{N}<user>", f"{N} \n<user>").replace(f"{N}</tool", f"\n\n{N}</tool")
    for written in (text, loose):
        assert parse(M3, f"Well.\n{written}\n", TOOLS) == ParsedAnswer(
            "Well.", "", [ParsedToolCall("order", '{"user": 1, "note": "x"}')]
        )


def test_a_text_may_mention_the_tags() -> None:
    text = f"Write {N}<city>x{N}</city> and </note>."
    assert read(element("note", text)) == {"note": text}
    inner = f"Write {N}<note>x{N}</note>."
    assert read(element("shipping", element("city", inner))) == {"shipping": {"city": inner}}


@pytest.mark.parametrize(
    "broken",
    [
        element("user", "1", element("a", "2")),  # text beside elements
        f"{N}<user>1{N}</note>",
        f"{N}<user>1",
        "loose text",
        f"{N}</user>",
        element("items", *[f"{N}<item>"] * 3),
    ],
)
def test_what_is_no_call_stays_content(broken) -> None:
    good, bad = call("now"), call("order", broken)
    text = section(good, bad)
    answer = parse(M3, text, TOOLS)
    assert answer.tool_calls == [ParsedToolCall("now", "{}")]
    assert answer.content.strip() == text.partition(good)[2].strip()
    assert parse(M3, section(bad), TOOLS) == ParsedAnswer(section(bad))


@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        ("", "<mm:think>Hm.</mm:think>Yes", ParsedAnswer("Yes", "Hm.")),
        ("", "</mm:think>\nYes", ParsedAnswer("Yes")),
        ("", "Yes </mm:think>", ParsedAnswer("Yes </mm:think>")),
        ("…<mm:think>", "Hm.</mm:think>Yes", ParsedAnswer("Yes", "Hm.")),
        ("…</mm:think>", "Yes", ParsedAnswer("Yes")),
    ],
)
def test_reasoning(prompt, text, answer) -> None:
    assert parse(M3, text, prompt_text=prompt) == answer


def test_forced_calls_are_nested() -> None:
    tokenizer = marked_tokenizer((N,))
    forced = detect("", "minimax_m3", tokenizer=tokenizer).forced([ORDER], "required")
    place = element("shipping", '{"city": "Rome"}')  # a reference, which may be recursive
    items = element("items", element("item", element("sku", "a"), element("qty", "1")))
    for good in (
        section(call("order", element("user", "1"), place, items)),
        section(call("order", element("user", "1"), element("items"))),
    ):
        assert accepts(tokenizer, forced, good)
    for bad in (
        section(call("order", place)),
        section(call("order", element("user", "1"), element("items", element("sku", "a")))),
    ):
        assert not accepts(tokenizer, forced, bad)
