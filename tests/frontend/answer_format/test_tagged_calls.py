"""Calls as tags: Qwen3-Coder's, Seed's, GLM's, MiniMax's, with types from the tools' schemas."""

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

CODER, SEED, GLM, MINIMAX = (
    detect("", name) for name in ("qwen3_coder", "seed_oss", "glm45", "minimax_m2")
)
TOOLS = [
    function(
        "write",
        path="string",
        text="string",
        mode="integer",
        tags="array",
        note={"type": ["string", "null"]},
        force="boolean",
    ),
    function("now"),
]
VALUES = {
    "path": "a b.txt",
    "text": 'One "two"\n\n  three\\n ',
    "mode": "420",
    "tags": '["x", {"y": 1}]',
    "note": "null",
    "force": "True",
    "other": "1.5",
}
EXPECTED = {
    "path": "a b.txt",
    "text": 'One "two"\n\n  three\\n ',
    "mode": 420,
    "tags": ["x", {"y": 1}],
    "note": None,
    "force": True,
    "other": 1.5,
}


def coder(values: dict[str, str], line: str = "\n") -> str:
    parameters = "".join(
        f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in values.items()
    )
    return f"<function=write>\n{parameters}</function>\n"


def glm(values: dict[str, str]) -> str:
    return "write\n" + "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )


def minimax(values: dict[str, str]) -> str:
    return (
        '<invoke name="write">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
        + "</invoke>\n"
    )


CASES = [
    (
        CODER,
        f"<tool_call>\n{coder(VALUES)}</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (CODER, coder(VALUES), "<function=now></function>"),  # without the outer tag
    (
        SEED,
        f"<seed:tool_call>\n{coder(VALUES, '')}</seed:tool_call>",
        "<seed:tool_call><function=now></function></seed:tool_call>",
    ),
    (GLM, f"<tool_call>{glm(VALUES)}</tool_call>", "<tool_call>now\n</tool_call>"),
    (
        MINIMAX,
        f"<minimax:tool_call>\n{minimax(VALUES)}</minimax:tool_call>",
        '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
    ),
    # two in one section
    (
        MINIMAX,
        f"<minimax:tool_call>\n{minimax(VALUES)}",
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
]


@pytest.mark.parametrize(("answer_format", "first", "second"), CASES)
def test_calls(answer_format, first, second) -> None:
    answer = parse(answer_format, f"I write.\n{first}\n{second}\n", TOOLS)
    assert (answer.content, [call.name for call in answer.tool_calls]) == (
        "I write.",
        ["write", "now"],
    )
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [EXPECTED, {}]


def test_whole_calls_of_a_section_that_breaks_off_are_calls() -> None:
    now, cut = '<invoke name="now">\n</invoke>\n', '<invoke name="write">\n<parameter name="path">a'
    answer = parse(MINIMAX, f"<minimax:tool_call>\n{now}{cut}", TOOLS)
    assert answer.tool_calls == [ParsedToolCall("now", "{}")] and answer.content.strip() == cut


def test_json_between_the_tags() -> None:
    inner = '{"name": "now", "arguments": {"a": 1}}'
    for answer_format, text in (
        (CODER, f"<tool_call>\n{inner}\n</tool_call>"),
        (GLM, f"<tool_call>{inner}</tool_call>"),
    ):
        assert parse(answer_format, text * 2, TOOLS) == ParsedAnswer(
            "", "", [ParsedToolCall("now", '{"a": 1}')] * 2
        )


def test_a_string_is_streamed_as_it_arrives() -> None:
    pieces = [
        "<tool_call>\n<function=write>\n<parameter=text>\n",
        "One\n",
        '"two',
        "</par",
        "a\n",
        "</parameter>",
        "\n<parameter=mode>4",
        "20</parameter></function>",
    ]
    assert parse_pieces(CODER, pieces, TOOLS) == [
        ToolCallStart(0, "write"),
        ToolCallArguments(0, '{"text": '),
        ToolCallArguments(0, '"'),
        ToolCallArguments(0, "One"),
        ToolCallArguments(0, '\\n\\"two'),
        ToolCallArguments(0, "</para"),
        ToolCallArguments(0, '"'),
        ToolCallArguments(0, ', "mode": '),
        ToolCallArguments(0, "420"),
        ToolCallArguments(0, "}"),
    ]


@pytest.mark.parametrize(
    ("answer_format", "text"),
    [
        (CODER, "<tool_call> is a tag"),
        (CODER, "<function=f"),
        (CODER, "<function=write> x"),
        (GLM, "<tool_call>a b</tool_call>"),
        (MINIMAX, "<minimax:tool_call>\n<inv"),
    ],
)
def test_text_that_is_not_a_call_stays_content(answer_format, text) -> None:
    assert parse(answer_format, text, TOOLS) == ParsedAnswer(text, "")


def test_a_truncated_or_broken_call_stays_content() -> None:
    text = "<tool_call>\n<function=write>\n<parameter=path>\na.t"
    assert parse(CODER, text, TOOLS) == ParsedAnswer(text)
    broken = "<tool_call>\n<function=write>\n<parameter=mode>\n4\n</parameter>\nand so on"
    assert parse(CODER, broken, TOOLS) == ParsedAnswer(broken)


def test_a_missing_end_tag_is_implied_by_the_next_tag() -> None:
    whole = "<tool_call>\n<function=write>\n<parameter=path>\na <b>.t\n</parameter>\n"
    whole += "<parameter=mode>\n4\n</parameter>\n</function>\n</tool_call>"
    meant = [ParsedToolCall("write", '{"path": "a <b>.t", "mode": 4}')]
    for tag, missing in (
        ("</parameter>\n<parameter=mode>", "<parameter=mode>"),
        ("</parameter>\n</function>", "</function>"),
        ("</function>\n</tool_call>", "</tool_call>"),
        ("\n</parameter>\n</function>\n</tool_call>", "</function></tool_call>"),
        ("\n</parameter>\n</function>\n</tool_call>", "</function>\n</tool_call>"),
        ("</parameter>\n</function>\n</tool_call>", "</tool_call>"),
        ("</tool_call>", ""),
    ):
        text = whole.replace(tag, missing)
        assert text != whole and parse(CODER, text, TOOLS) == ParsedAnswer("", "", meant), text
        assert parse(CODER, f"{text}\n{whole}", TOOLS).tool_calls == meant * 2, text


def test_values_without_lines_may_lack_their_end_tags_too() -> None:
    text = "<tool_call><function=write><parameter=path>a.t<parameter=mode>4</function></tool_call>"
    assert parse(CODER, text, TOOLS) == ParsedAnswer(
        "", "", [ParsedToolCall("write", '{"path": "a.t", "mode": 4}')]
    )


def test_a_tag_within_a_line_is_text() -> None:
    value = "say <parameter=x> or </function>, not </tool_call>"
    text = f"<tool_call>\n<function=write>\n<parameter=text>\n{value}\n</parameter>\n</function>\n"
    (call,) = parse(CODER, f"{text}</tool_call>", TOOLS).tool_calls
    assert json.loads(call.arguments) == {"text": value}


def test_forced_values_may_contain_any_tag_but_their_own_end() -> None:
    value = "a\n<parameter=b>\n</function>\n</tool_call>"
    text = f"<tool_call>\n<function=write>\n<parameter=text>\n{value}\n</parameter>\n</function>\n"
    (call,) = parse(CODER, f"{text}</tool_call>", TOOLS, calls_are_valid=True).tool_calls
    assert json.loads(call.arguments) == {"text": value}


DSML = detect("", "deepseek_v4")


@pytest.mark.parametrize(
    ("key", "kind", "value", "meant"),
    [
        ("path", ' string="true"', "5", "5"),
        ("mode", ' string="true"', "5", "5"),  # the model says so
        ("mode", ' string="false"', "5", 5),
        ("path", ' string="false"', "5", "5"),  # the schema does
        ("tags", ' string="false"', '["x", {"y": 1}]', ["x", {"y": 1}]),
        ("other", ' string="false"', "true", True),
        ("other", ' string="true"', " a\n<b>\n", " a\n<b>\n"),
        ("mode", "", "420", 420),
    ],
)
def test_deepseek_says_what_is_text(key, kind, value, meant) -> None:
    text = (
        'Well.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n'
        f'<｜DSML｜parameter name="{key}"{kind}>{value}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    )
    answer = parse(DSML, text, TOOLS)
    assert (answer.content, [call.name for call in answer.tool_calls]) == (
        "Well.",
        ["write", "now"],
    )
    assert json.loads(answer.tool_calls[0].arguments) == {key: meant}
    broken = text.replace(f'"{key}"{kind}', f'"{key}" string="maybe"')
    assert parse(DSML, broken, TOOLS).content.startswith(broken[: broken.index("maybe")])
