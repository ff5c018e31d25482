"""Capabilities of templates of different kinds, and the form of conversations with calls that each
expects.
"""

from __future__ import annotations

from typing import Any

import pytest
from quire.frontend.text.chat_template import render_chat, template_traits
from quire.frontend.text.template_traits import TemplateTraits
from quire.tests.frontend.answer_format.templates import TEMPLATES

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
LOOP = "{% for m in messages %}[{{ m.role }}] BODY{% endfor %}"
CONTENT = "{% if m.content %}{{ m.content }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }} ARGUMENTS{% endfor %}"


def template(
    calls: str = CALLS,
    arguments: str = "{{ c.function.arguments | tojson }}",
    content: str = CONTENT,
    tools: str = TOOLS,
) -> str:
    return tools + LOOP.replace("BODY", content + calls.replace("ARGUMENTS", arguments))


CONVERSATION = [
    {"role": "user", "content": "What?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_0123456789", "function": {"name": "f", "arguments": '{"a": "é"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "42"},
]


@pytest.mark.parametrize(
    ("source", "traits", "written"),
    [
        (template(), {}, '[user] What?[assistant] f {"a": "é"}[tool] 42'),
        (
            template(arguments="{{ c.function.arguments.items() | list }}"),
            {"writes_calls": False},
            "[user] What?[assistant] f [('a', 'é')][tool] 42",
        ),
        (
            template(arguments="{{ c.function.arguments }}"),
            {"arguments_as_text": True},
            '[user] What?[assistant] f {"a": "é"}[tool] 42',
        ),
        (
            template(arguments="{{ '=' + c.function.arguments }}"),
            {"arguments_as_text": True},
            '[user] What?[assistant] f ={"a": "é"}[tool] 42',
        ),
        (
            template(content="{{ m.content }}"),
            {},
            '[user] What?[assistant] f {"a": "é"}[tool] 42',
        ),
        (
            template(content="{{ '' + m.content }}"),
            {"empty_content": True},
            '[user] What?[assistant] f {"a": "é"}[tool] 42',
        ),
        (
            template(content="{{ m.content + '.' }}"),
            {"empty_content": True},
            '[user] What?.[assistant] .f {"a": "é"}[tool] 42.',
        ),
        (
            template(
                calls="{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ "
                "raise_exception('ids!') }}{% endif %}{{ c.id }} {{ c | tojson }}{% endfor %}"
            ),
            {"short_ids": True},
            '[user] What?[assistant] 123456789 {"id": "123456789", "function": {"name": "f", '
            '"arguments": {"a": "é"}}, "type": "function"}[tool] 42',
        ),
        (template(calls=""), {"writes_calls": False}, "[user] What?[assistant] [tool] 42"),
    ],
)
def test_calls_have_the_form_that_the_template_expects(source, traits, written) -> None:
    expected = {"takes_tools": True, "writes_calls": True, "knows_developer": False, **traits}
    assert template_traits(source) == TemplateTraits(**expected)
    assert render_chat(source, CONVERSATION) == written


def test_a_template_with_one_call_per_turn() -> None:
    refusing = template(
        calls="{% if m.tool_calls | default([]) | length > 1 %}{{ raise_exception('one!') }}{% "
        "endif %}" + CALLS
    )
    first_alone = template(calls=CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"))
    assert [
        template_traits(source).takes_several_calls
        for source in (template(), refusing, first_alone)
    ] == [True, False, False]


@pytest.mark.parametrize(
    ("source", "takes_tools"),
    [
        (template(), True),
        (template(tools=""), False),
        ("{% if messages[0].role == 'system' %}" + TOOLS + "{% endif %}", True),
        ("{{ raise_exception('never') }}", False),
        ("{% no Jinja", False),
        ("tools", False),
    ],
)
def test_whether_the_prompt_contains_the_tools(source, takes_tools) -> None:
    assert template_traits(source).takes_tools is takes_tools


def test_the_role_developer() -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    assert render_chat(template(), messages) == "[system] Be brief."
    assert render_chat("{# developer #}" + template(), messages) == "[developer] Be brief."


# ---------------------------------------------------------------- gpt-oss

HARMONY_TRAITS = TemplateTraits(
    takes_tools=True,
    writes_calls=True,
    takes_several_calls=False,
    one_call=True,
    one_instruction=True,
    reads_thinking=True,
    thinking_or_content=True,
    results_as_json=True,
)


def call(identifier: str, name: str) -> dict[str, Any]:
    return {"id": identifier, "function": {"name": name, "arguments": '{"a": 1}'}}


def test_a_conversation_for_gpt_oss() -> None:
    """Instructions become one, each call has its message and its result, reasoning and text before
    a call are `thinking`, and results that are JSON stay unquoted.
    """
    source = TEMPLATES["harmony"]
    assert template_traits(source) == HARMONY_TRAITS
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("1", "f"), call("2", "g")],
        },
        {"role": "tool", "tool_call_id": "2", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "content": '{"b": "é"}'},
        {"role": "developer", "content": "In French."},
        {"role": "assistant", "reasoning": "Broke off"},
    ]
    assert render_chat(source, messages, add_generation_prompt=True) == (
        "<|start|>system<|message|>Reasoning: medium<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\nIn French.<|end|>"
        "<|start|>user<|message|>What?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\nLet me see.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>{"b": "é"}<|end|>'
        '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"noon"<|end|>'
        "<|start|>assistant<|channel|>final<|message|><|end|><|start|>assistant"
    )


def test_a_template_that_needs_descriptions_of_tools() -> None:
    source = template(
        tools="{% for tool in tools or [] %}{{ '//' + tool.function.description + ' ' + "
        "tool.function.name }}{% endfor %}"
    )
    assert template_traits(source).needs_descriptions
    bare = {"type": "function", "function": {"name": "f"}}
    described = {"type": "function", "function": {"name": "g", "description": "G."}}
    written = render_chat(source, CONVERSATION[:1], tools=[bare, described])
    assert written == "// f//G. g[user] What?"
    assert "description" not in bare["function"]
    assert not template_traits(template()).needs_descriptions


def test_several_system_messages() -> None:
    first = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    source = first + "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    assert template_traits(source).one_instruction
    messages = [{"role": r, "content": c} for r, c in (("user", "What?"), ("system", "Be brief."))]
    assert render_chat(source, messages) == "Be brief.[What?]"
    assert render_chat(template(), messages) == "[user] What?[system] Be brief."
