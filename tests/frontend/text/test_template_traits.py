"""Capabilities of templates of different kinds, and the form of conversations with calls that each
expects.
"""

from __future__ import annotations

import pytest
from quire.frontend.text.chat_template import render_chat, template_traits
from quire.frontend.text.template_traits import TemplateTraits

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
