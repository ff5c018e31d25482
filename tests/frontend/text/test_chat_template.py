"""Chat templates against transformers' apply_chat_template, and hostile or broken templates."""

from __future__ import annotations

import json
import re

import pytest
from quire import InvalidParameterError, ModelLoadError
from quire.frontend.text.chat_template import choose_template, read_chat_templates, render_chat
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.frontend.tiny_tokenizers import tiny_tokenizer_directory

CHATML = (
    "{% for message in messages %}\n{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
)
TOOLS = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}{%- endfor %}"
    "{{ (documents or []) | length }}"
)
LOOP_CONTROLS = (
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% break %}{% endfor %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% set x "
    "= 1 %}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
NAMESPACE = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ "
    "ns.n }}{{ strftime_now('%Y') }}"
)

CHAT = [
    {"role": "system", "content": "Be <brief> & “kind”. 好"},
    {"role": "user", "content": " what is 2+2?  "},
    {"role": "assistant", "content": "It is "},
]
TOOL = {"type": "function", "function": {"name": "f", "description": 'é "<b>"', "parameters": {}}}


@pytest.fixture(scope="module")
def oracle():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer_directory())


@pytest.mark.parametrize(
    "template", [CHATML, TRIMMING, TOOLS, LOOP_CONTROLS, GENERATION, NAMESPACE, None]
)
@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": True}, {"documents": [{"title": "a", "text": "b"}]}]
)
def test_same_as_transformers(oracle, template, options) -> None:
    ours = Tokenizer(tiny_tokenizer_directory())
    for messages in (CHAT, CHAT[1:2]):
        expected = oracle.apply_chat_template(
            messages, chat_template=template, tokenize=False, bos_token="<B>", **options
        )
        assert (
            ours.apply_chat_template(
                messages, chat_template=template, tokenize=False, bos_token="<B>", **options
            )
            == expected
        )


def test_tools_as_in_transformers_or_refused(oracle) -> None:
    ours = Tokenizer(tiny_tokenizer_directory())
    expected = oracle.apply_chat_template(CHAT, chat_template=TOOLS, tokenize=False, tools=[TOOL])
    assert (
        ours.apply_chat_template(CHAT, chat_template=TOOLS, tokenize=False, tools=[TOOL])
        == expected
    )
    for template in (CHATML, TRIMMING, LOOP_CONTROLS, None):
        with pytest.raises(
            InvalidParameterError,
            match="tools: the model's chat template does not write tools into the prompt",
        ):
            ours.apply_chat_template(CHAT, chat_template=template, tokenize=False, tools=[TOOL])
        assert ours.apply_chat_template(CHAT, chat_template=template, tokenize=False, tools=[])


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@pytest.mark.parametrize("content", ["It is ", "It is\n", "\n\n It", "x"])
def test_continued_messages_as_in_transformers(oracle, template, content) -> None:
    messages = [*CHAT[:2], {"role": "assistant", "content": content}]
    expected = oracle.apply_chat_template(
        messages, chat_template=template, tokenize=False, bos_token="", continue_final_message=True
    )
    assert (
        render_chat(template, messages, continue_final_message=True, variables={"bos_token": ""})
        == expected
    )
    assert messages[-1]["content"] == content


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert (
        render_chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    )


WITHOUT_CONTENT = [CHAT[1], {"role": "assistant", "content": None, "name": None}]


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content | trim }}{{ m.content ~ 'x' }}]{% endfor %}",
        "{{ 'content' in messages[1] }} {{ messages[1].content is none }} {{ messages[1].name }}",
        "{% if tools is not none %}You have {{ tools | length }} tools.{% endif %} {{ tools }}",
    ],
)
def test_no_content_and_no_tools_are_as_in_transformers(oracle, template, tools) -> None:
    """content=None is a missing key, not the text None; [] reaches the template as []."""
    ours = Tokenizer(tiny_tokenizer_directory())
    options = {"chat_template": template, "tokenize": False, "tools": tools}
    expected = oracle.apply_chat_template(WITHOUT_CONTENT, **options)
    assert ours.apply_chat_template(WITHOUT_CONTENT, **options) == expected


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages: must be a list of at least one message"),
        ([{"role": "user", "content": 5}], "messages[0].content: must be a string"),
        (
            [{"role": "assistant", "tool_calls": [5]}],
            "messages[0].tool_calls[0].function: must be an object",
        ),
    ],
)
def test_bad_messages(messages, problem) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape(problem)):
        render_chat(CHATML, messages)


def test_a_template_that_refuses_or_fails() -> None:
    messages = [{"role": "user", "content": "x"}]
    for template, parameter, words in (
        (
            "{{ raise_exception('Roles must alternate!') }}",
            "messages",
            "refuses them: Roles must alternate!",
        ),
        ("{{ messages[0].content.nothing.more }}", "messages", "has no attribute"),
        ("{{ 1 / 0 }}", "messages", "division by zero"),
        ("{% for %}", "chat_template", r"not valid Jinja: .*\(line 1\)"),
    ):
        with pytest.raises(InvalidParameterError, match=words) as raised:
            render_chat(template, messages)
        assert raised.value.parameter == parameter


@pytest.mark.parametrize("error", [MemoryError(), OSError("Too many open files")])
def test_an_error_of_the_process_does_not_blame_the_messages(monkeypatch, error) -> None:
    def fail(*_):
        raise error

    monkeypatch.setattr("quire.frontend.text.template_sandbox.render", fail)
    with pytest.raises(type(error)):
        render_chat(CHATML, CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% set ns = namespace(__html__=raise_exception) %}",
        "{% set ns = namespace() %}{% set ns.__html__ = raise_exception %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template) -> None:
    problem = "the chat template refuses them|'include' is not allowed here"
    with pytest.raises(InvalidParameterError, match=problem):
        render_chat(template, [{"role": "user", "content": "x"}])


def test_continuing_needs_a_rendered_last_message() -> None:
    with pytest.raises(InvalidParameterError, match="add_generation_prompt"):
        render_chat(CHATML, CHAT, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidParameterError, match="does not write the last message"):
        render_chat("nothing", CHAT, continue_final_message=True)


def test_sources_of_templates(tmp_path) -> None:
    assert read_chat_templates(tmp_path, {}) == {}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert read_chat_templates(tmp_path, {}) == {"default": "from json"}
    assert read_chat_templates(tmp_path, {"chat_template": "from config"}) == {
        "default": "from config"
    }
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert read_chat_templates(tmp_path, {"chat_template": named}) == {
        "default": "a",
        "tool_use": "b",
    }
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("c")
    assert read_chat_templates(tmp_path, {"chat_template": named}) == {
        "default": "from jinja",
        "tool_use": "b",
        "rag": "c",
    }
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja cannot be read"):
        read_chat_templates(tmp_path, {})


def test_selection_of_a_template() -> None:
    templates = {"default": "a", "tool_use": "b"}
    assert choose_template(templates, None) == "a"
    assert choose_template(templates, None, with_tools=True) == "b"
    assert choose_template({"default": "a"}, None, with_tools=True) == "a"
    assert choose_template(templates, "tool_use") == "b"
    assert choose_template(templates, "{{ literal }}") == "{{ literal }}"
    problem = "chat_template: the model has no default chat template: it is a base model.* FILE"
    with pytest.raises(InvalidParameterError, match=problem):
        choose_template({}, None)
    with pytest.raises(InvalidParameterError, match="rag"):
        choose_template({"rag": "c"}, None)
