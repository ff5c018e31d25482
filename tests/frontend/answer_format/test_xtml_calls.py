"""Kimi K3's channels and calls."""

from __future__ import annotations

import json

import pytest
from quire import SamplingParams, StructuredOutputsParams
from quire.frontend.answer_format import ParsedAnswer, ParsedToolCall, detect
from quire.tests.frontend.answer_format.cuts import function, parse
from quire.tests.frontend.answer_format.grammars import accepts, marked_tokenizer

MARKS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
K3 = detect("", "kimi_k3", "kimi_k3")
TOOLS = [
    function("f", a="string", n="integer", b={"type": ["boolean", "null"]}, c="array"),
    function("g"),
]


def opened(tag: str) -> str:
    return f"<|open|>{tag}<|sep|>"


def closed(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def channel(name: str, text: str) -> str:
    return opened(name) + text + closed(name)


def argument(key: str, kind: str, value: str) -> str:
    return opened(f'argument key="{key}" type="{kind}"') + value + closed("argument")


def call(name: str, *arguments: str, index: int = 1) -> str:
    return opened(f'call tool="{name}" index="{index}"') + "".join(arguments) + closed("call")


THINKING, TALKING = (f"…{opened(name)}" for name in ("think", "response"))
CALLS = channel(
    "tools",
    call("f", argument("a", "string", ' x"\n'), argument("n", "number", "2")) + call("g", index=2),
)
CALLED = [ParsedToolCall("f", '{"a": " x\\"\\n", "n": 2}'), ParsedToolCall("g", "{}")]
END = closed("message")


@pytest.mark.parametrize("end", ["", END])
@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        (THINKING, f"Hm.{closed('think')}{channel('response', 'Yes')}", ("Yes", "Hm.", [])),
        (THINKING, f"Hm.{closed('think')}{channel('response', '')}{CALLS}", ("", "Hm.", CALLED)),
        (THINKING, f"{closed('think')}{channel('response', 'So.')}{CALLS}", ("So.", "", CALLED)),
        (TALKING, f"Yes{closed('response')}", ("Yes", "", [])),
        (TALKING, f"Yes{closed('response')}{CALLS}", ("Yes", "", CALLED)),
        (TALKING, f"Yes{CALLS}", ("Yes", "", CALLED)),
        ("", f"{channel('think', 'Hm.')}{channel('response', 'Yes')}", ("Yes", "Hm.", [])),
        ("", "Yes", ("Yes", "", [])),
    ],
)
def test_channels(prompt, text, answer, end) -> None:
    expected = ParsedAnswer(*answer)
    assert parse(K3, text + end, TOOLS, prompt_text=prompt) == expected
    if not expected.tool_calls:
        assert parse(K3, text + end, [], prompt_text=prompt) == expected


def test_types_and_escapes() -> None:
    written = call(
        "a&amp;b",
        argument("a", "string", "12"),
        argument("n", "number", "1.0"),
        argument("x&quot;&amp;quot;", "object", '{"k": [1, null]}'),
        argument("b", "null", "null"),
        argument("c", "array", "[]"),
        argument("d", "boolean", "true"),
    )
    for text in (written, written.replace('" type="', '"   type="'), f"\n{written}\n"):
        (found,) = parse(K3, channel("tools", text), TOOLS).tool_calls
        assert found.name == "a&b"
        assert json.loads(found.arguments) == {
            "a": "12",
            "n": 1.0,
            'x"&quot;': {"k": [1, None]},
            "b": None,
            "c": [],
            "d": True,
        }
    untyped = opened('argument key="a"') + "12" + closed("argument")
    (found,) = parse(K3, channel("tools", call("f", untyped)), TOOLS).tool_calls
    assert found == ParsedToolCall("f", '{"a": "12"}')  # by the schema


def test_arguments_in_one_object() -> None:
    for tag in ("json", 'json type="object"'):
        inner = opened(tag) + '{"a": "x"}' + closed("json")
        (found,) = parse(K3, channel("tools", call("f", inner)), TOOLS).tool_calls
        assert found == ParsedToolCall("f", '{"a": "x"}')


@pytest.mark.parametrize(
    "broken",
    [
        call("f", opened("json") + '{"a": ' + closed("json")),
        call("f", argument("a", "string", "x")).removesuffix(closed("call")),
        call("f", "text"),
        opened('call tool="f'),
        opened('call tool=""'),
    ],
)
def test_what_is_no_call_stays_content(broken) -> None:
    good = call("g")
    text = opened("tools") + good + broken
    answer = parse(K3, text, TOOLS)
    assert answer == ParsedAnswer(broken, "", [ParsedToolCall("g", "{}")])
    assert parse(K3, opened("tools") + broken, TOOLS) == ParsedAnswer(opened("tools") + broken)


@pytest.mark.parametrize("marks", [(), MARKS], ids=["as text", "as tokens"])
def test_forced_calls_follow_the_channels(marks) -> None:
    tokenizer = marked_tokenizer(marks)
    k3 = detect("", "kimi_k3", "kimi_k3", tokenizer)
    empty = channel("response", "")
    for prompt, good, bad in (
        (THINKING, f"Hm.{closed('think')}{empty}{CALLS}", f"Hm.{closed('think')}{CALLS}"),
        (TALKING, f"{closed('response')}{CALLS}", CALLS),
        ("", f"{channel('think', 'Hm.')}{empty}{CALLS}", f"Hm.{CALLS}"),
    ):
        params = k3.forced(TOOLS, "required", prompt_text=prompt)
        assert accepts(tokenizer, params, good) and not accepts(tokenizer, params, bad)
        assert parse(k3, good, TOOLS, prompt_text=prompt).tool_calls == CALLED
    asked = StructuredOutputsParams(json={"type": "integer"})
    either = k3.after_reasoning(asked, THINKING, tools=TOOLS)
    for good in (channel("response", "5"), empty + CALLS):
        assert accepts(tokenizer, either, f"Hm.{closed('think')}{good}")
    assert not accepts(tokenizer, either, f"Hm.{closed('think')}5")
    assert k3.after_reasoning(asked, TALKING) is asked


def test_an_answer_ends_with_its_message() -> None:
    tokenizer = marked_tokenizer(MARKS)
    params = detect("", "kimi_k3", "kimi_k3", tokenizer).adapt(SamplingParams())
    assert [tokenizer.decode([i], False) for i in params.stop_token_ids] == ["<|end_of_msg|>"]
    assert not params.skip_special_tokens
