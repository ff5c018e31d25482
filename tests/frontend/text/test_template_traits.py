"""Capabilities of templates of different kinds, and the form of conversations with calls that each
expects.
"""

from __future__ import annotations

import re
from itertools import product
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
    named = "{% set developer_preamble = '' %}{# developer #}" + template()
    assert render_chat(named, messages) == "[system] Be brief."
    for source in (
        template().replace("[{{ m.role }}]", "{{ '<dev>' if m.role == 'developer' else m.role }}"),
        "{% for m in messages if m.role == 'developer' %}<dev>{{ m.content }}{% endfor %}",
    ):
        assert render_chat(source, messages).strip().replace(" ", "") == "<dev>Bebrief."


# ---------------------------------------------------------------- gpt-oss

HARMONY_TRAITS = TemplateTraits(
    takes_tools=True,
    writes_calls=True,
    takes_several_calls=False,
    one_call=True,
    lost_instructions=frozenset(product(("leading", "late"), ("system", "developer"))),
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
    assert template_traits(source).lost_instructions == {("leading", "system"), ("late", "system")}
    messages = [{"role": r, "content": c} for r, c in (("user", "What?"), ("system", "Be brief."))]
    assert render_chat(source, messages) == "Be brief.[What?]"
    assert render_chat(template(), messages) == "[user] What?[system] Be brief."


# ---------------------------------------------------------------- what templates of this year do

RAISE = "{{ raise_exception('refused') }}"
POP_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ '[S]' + messages[0].content }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
)
ALTERNATING = (
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + RAISE
    + "{% endif %}"
    "{{ '[' + m.role + ']' + m.content }}{% endfor %}"
)
EACH_CALL = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
TURN = "{{ '[' + m.role + ']' + (m.content or '') }}" + EACH_CALL
# the construct that decides, of each family
CONSTRUCTS = {
    "granite 3": POP_SYSTEM
    + "{% for m in rest %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}",
    "qwq": "{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role != 'assistant' %}"
    "{{ '' + m.content }}{% else %}{% set content = m.content %}{% if not loop.last %}"
    "{% set content = m.content.split('</think>')[-1] %}{% endif %}{% if m.content %}"
    "{{ content }}{% endif %}" + EACH_CALL + "{% endif %}{% endfor %}",
    "kat": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '[assistant]' + m.content.lstrip('\n') }}" + EACH_CALL + "{% else %}"
    "{{ '[' + m.role + ']' + m.content }}{% endif %}{% endfor %}",
    "lfm2": "{% for m in messages %}{% set content = m['content'] %}{% if content is not string %}"
    "{% set content = content | tojson %}{% endif %}{{ '[' + m['role'] + ']' + content }}"
    "{% endfor %}",
    "qwen3.5": "{% for m in messages %}{% if m.role == 'system' and not loop.first or "
    "m.role not in ['system', 'user', 'assistant', 'tool'] %}" + RAISE + "{% endif %}"
    "{{ '[' + m.role + ']' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% for k, v in c.function.arguments | items %}{{ k + '=' + v }}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "ministral 3": POP_SYSTEM + "{% for m in rest %}"
    "{% if m.role not in ['user', 'assistant', 'tool'] %}"
    + RAISE
    + "{% endif %}"
    + TURN
    + "{% endfor %}",
    "gemma 3": "{% if messages[0].role == 'system' %}{% set prefix = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}"
    "{% endif %}{{ prefix }}" + ALTERNATING,
    "gemma 2": "{% if messages[0].role == 'system' %}" + RAISE + "{% endif %}"
    "{% set rest = messages %}" + ALTERNATING,
    "mistral nemo": "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest | rejectattr('tool_calls', 'defined') | selectattr('role', 'ne', 'tool') %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + RAISE + "{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}[user]{% if loop.last and system is defined %}"
    "{{ system + '\n\n' }}{% endif %}{{ m.content }}{% elif m.tool_calls is defined %}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}" + RAISE + "{% endif %}{{ '[tool]' + m.content }}"
    "{% else %}" + RAISE + "{% endif %}{% endfor %}",
    "command r7b": "{% set developer_preamble = '' %}{% for m in messages %}"
    "{% if m.role in ['system', 'user', 'tool'] %}{{ '[' + m.role + ']' + m.content }}"
    "{% elif m.role == 'assistant' %}" + TURN + "{% endif %}{% endfor %}",
    "deepseek v3.2": "{% set ns = namespace(text='', developer=false) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.text = ns.text + '\n' + m.content %}{% endif %}"
    "{% endfor %}{{ ns.text }}{% for m in messages %}"
    "{% if m.role in ['user', 'tool', 'assistant'] %}" + TURN + "{% endif %}{% endfor %}",
    "apertus": POP_SYSTEM + "{{ '<|developer_start|>none<|developer_end|>' }}{% for m in rest %}"
    "{% if m.role in ['user', 'assistant', 'tool'] %}"
    + TURN
    + "{% else %}"
    + RAISE
    + "{% endif %}{% endfor %}",
    "kimi k2": "{% for m in messages %}{{ '[' + m.role + '/' + (m.name or m.role) + ']' }}"
    "{% if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}"
    "{{ m.content or '' }}" + EACH_CALL + "{% endfor %}",
}
REFUSE_RESULTS = {"gemma 3", "gemma 2"}
SYSTEM, USER, ANSWER = (
    {"role": role, "content": content}
    for role, content in (("system", "Be brief."), ("user", "What?"), ("assistant", "That."))
)
DEVELOPER = {"role": "developer", "content": "In French."}


@pytest.mark.parametrize("family", CONSTRUCTS)
@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, USER],
        [DEVELOPER, USER],
        [SYSTEM, {**SYSTEM, "content": "In French."}, USER],
        [SYSTEM, DEVELOPER, USER],
        [SYSTEM, USER, ANSWER, {**SYSTEM, "content": "In French."}, USER],
        [SYSTEM, USER, ANSWER, DEVELOPER, USER],
        [USER, ANSWER, SYSTEM, USER],
        # as Codex begins a conversation, and goes on after an interruption
        [DEVELOPER, {**USER, "content": "A folder."}, USER],
        [USER, ANSWER, {**USER, "content": "A folder."}, DEVELOPER, USER],
    ],
    ids=lambda messages: " ".join(m["role"] for m in messages),
)
def test_every_instruction_reaches_the_prompt(family: str, messages) -> None:
    written = render_chat(CONSTRUCTS[family], messages)
    for message in messages:
        assert message["content"] in written
    for word in ("Be brief.", "In French."):
        assert written.count(word) == sum(m["content"] == word for m in messages)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
@pytest.mark.parametrize("family", sorted(CONSTRUCTS.keys() - REFUSE_RESULTS))
def test_a_call_without_content_is_accepted_with_its_result(family: str, content) -> None:
    """As `LLM.chat` and every API send it: {"content": None, "tool_calls": [...]}."""
    calling = {"role": "assistant", "tool_calls": CONVERSATION[1]["tool_calls"], **content}
    written = render_chat(CONSTRUCTS[family], [USER, calling, CONVERSATION[2], ANSWER, USER])
    assert "None" not in written and "null" not in written
    assert all(word in written for word in ("42", "That.", "What?"))
    if family not in ("granite 3", "lfm2"):  # they write no calls
        assert len(re.findall("é", written)) == 1, written


def test_a_result_gets_a_name_only_where_the_template_fails_without() -> None:
    turn = CONVERSATION[1:]
    assert "[tool/tool]## Return of call_0123456789\n42" in render_chat(CONSTRUCTS["kimi k2"], turn)
    failing = template(
        content="{% if m.role == 'tool' %}{{ m.name + ': ' }}{% endif %}{{ m.content }}"
    )
    assert template_traits(failing).result_names
    assert render_chat(failing, turn).endswith("[tool] f: 42")
    given = [turn[0], {**turn[1], "name": "g"}]
    assert "[tool/g]" in render_chat(CONSTRUCTS["kimi k2"], given)
    assert render_chat(failing, given).endswith("[tool] g: 42")


def test_the_traits_of_the_families() -> None:
    """Only what a template needs is changed: equality with transformers elsewhere."""
    everything = set(product(("leading", "late"), ("system",)))
    traits = {family: template_traits(source) for family, source in CONSTRUCTS.items()}
    assert {family for family, found in traits.items() if found.empty_content} == {
        "granite 3",
        "qwq",
        "kat",
        "lfm2",
        *REFUSE_RESULTS,
    }
    assert {family for family, found in traits.items() if found.knows_developer} == set()
    assert {family for family, found in traits.items() if not found.takes_system} == {"gemma 2"}
    assert {family for family, found in traits.items() if not found.takes_neighbours} == {
        "gemma 3",
        "gemma 2",
        "mistral nemo",
    }
    assert {family for family, found in traits.items() if found.lost_instructions} == {
        "qwen3.5",
        "ministral 3",
        "gemma 3",
        "mistral nemo",
        "apertus",
    }
    assert traits["qwen3.5"].lost_instructions == everything
    assert {family for family, found in traits.items() if found.result_names} == set()
    assert {family for family, found in traits.items() if found.function_ids} == set()


def test_the_ids_of_a_template_that_writes_no_names_of_functions_name_them() -> None:
    """As Kimi K2's, whose ids the model counts through the conversation."""
    source = TOOLS + LOOP.replace(
        "BODY",
        CONTENT
        + "{% for c in m.tool_calls or [] %}<{{ c.id }}>{{ c.function.arguments | tojson }}"
        + "{% endfor %}{% if m.role == 'tool' %} of {{ m.tool_call_id }}{% endif %}",
    )
    assert template_traits(source).function_ids
    assert not template_traits(template()).function_ids

    def called(*ids: str | None) -> dict[str, Any]:
        calls = [
            {"function": {"name": "my.f", "arguments": "{}"}} | ({"id": i} if i else {})
            for i in ids
        ]
        return {"role": "assistant", "tool_calls": calls}

    def result(identifier: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": identifier, "content": "4"}

    turns = [called("toolu_1", "functions.my.f:9"), result("functions.my.f:9"), result("toolu_1")]
    assert render_chat(source, [*turns, called(None), called("toolu_1"), result("toolu_1")]) == (
        "[assistant] <functions.my.f:0>{}<functions.my.f:1>{}[tool] 4 of functions.my.f:1"
        "[tool] 4 of functions.my.f:0[assistant] <functions.my.f:2>{}[assistant] "
        "<functions.my.f:3>{}[tool] 4 of functions.my.f:3"
    )
