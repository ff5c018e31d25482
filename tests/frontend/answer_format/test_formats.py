"""The detection of a format from the template, its overrides, and that the output of each template
is parsed back.
"""

from __future__ import annotations

import json

import pytest
from quire import InvalidParameterError
from quire.frontend.answer_format import Answer, ToolCall, detect
from quire.frontend.answer_format.formats import TOOL_FORMATS
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.text.chat_template import choose_template, render_chat
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.frontend.answer_format.cuts import function, parse
from quire.tests.frontend.answer_format.grammars import marked_tokenizer
from quire.tests.frontend.answer_format.templates import TEMPLATES


def test_a_template_without_marks_has_no_format() -> None:
    for template in (None, "", "{{ messages }}"):
        found = detect(template)
        assert (found.tool_name, found.reasoning_name, found.skip_special_tokens) == (
            None,
            None,
            True,
        )


def test_flags_override() -> None:
    template = "<tool_call> </think>"
    assert (detect(template).tool_name, detect(template).reasoning_name) == ("hermes", "think")
    off = detect(template, "none", "none")
    assert (off.tool_name, off.reasoning_name) == (None, None)
    on = detect("", "hermes", "think")
    assert (on.tool_name, on.reasoning_name) == ("hermes", "think")
    for parameter in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(
            InvalidParameterError, match=f"{parameter}: must be one of auto, none, .*got 'x'"
        ):
            detect(template, **{parameter: "x"})


# ---------------------------------------------------------------- real templates, round trip

CALLS = [
    ToolCall(
        "get_weather", '{"city": "New \\"York\\"\\n{}", "days": 3, "units": ["C", {"é": null}]}'
    ),
    ToolCall("f", '{"flag": true, "ratio": -0.5}'),
    ToolCall("g", "{}"),
]
SINGLE = {"flag": "boolean", "ratio": "number"}
TOOLS = [
    function("get_weather", city="string", days="integer", units="array"),
    function("f", **SINGLE),
    function("g"),
]


def turn(calls: list[ToolCall], content: str | None) -> dict:
    ids = [f"functions.{call.name}:{i}" for i, call in enumerate(calls)]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": i, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for i, c in zip(ids, calls, strict=True)
        ],
    }


@pytest.mark.parametrize("calls", [CALLS, CALLS[2:]], ids=["three calls", "one call"])
@pytest.mark.parametrize("content", [None, "Let me see."])
@pytest.mark.parametrize("name", TEMPLATES)
def test_template_output_is_parsed_back(name, content, calls) -> None:
    template, user = TEMPLATES[name], {"role": "user", "content": "What is the weather?"}
    answer_format = detect(template)
    assert answer_format.tool_name == name
    prompt = render_chat(template, [user], tools=TOOLS, add_generation_prompt=True)
    whole = render_chat(template, [user, turn(calls, content)], tools=TOOLS)
    assert whole.startswith(prompt)
    if answer_format.tool_format.bare_beginnings and content:
        return  # such models write either text or calls
    answer = parse(answer_format, whole[len(prompt) :].removesuffix("<|im_end|>\n"), TOOLS)
    if name == "harmony":  # its template writes content before calls as reasoning
        answer.content, answer.reasoning = answer.reasoning, ""
    calls = calls if answer_format.several_calls else calls[:1]
    assert (answer.content, [call.name for call in answer.tool_calls]) == (
        content or "",
        [call.name for call in calls],
    )
    for read, written in zip(answer.tool_calls, calls, strict=True):
        assert json.loads(read.arguments) == json.loads(written.arguments)


def test_reasoning_of_an_earlier_turn_is_parsed_back() -> None:
    template = TEMPLATES["hermes"]
    message = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Hm, <tool_call>?"}
    text = (
        render_chat(template, [message])
        .removeprefix("<|im_start|>assistant\n")
        .removesuffix("<|im_end|>\n")
    )
    assert parse(detect(template), text) == Answer("Sunny.", "Hm, <tool_call>?")


def test_every_format_has_its_template() -> None:
    assert {row.name for row in TOOL_FORMATS if row.marks} == TEMPLATES.keys()


@pytest.mark.parametrize(
    ("template", "flag", "reason"),
    [
        (None, "auto", "this model has no chat template"),
        (
            "{{ messages }}",
            "auto",
            "the chat template of this model does not write them into the prompt",
        ),
        (
            "{{ tools }}{{ messages }}",
            "auto",
            "does not show how this model writes calls; set tool_call_parser to one of .*hermes",
        ),
        (TEMPLATES["hermes"], "none", "are disabled"),
    ],
)
def test_the_reason_why_a_model_has_no_tools(template, flag, reason) -> None:
    with pytest.raises(InvalidParameterError, match=f"tools: .*{reason}"):
        detect(template, flag).require_tools()
    detect(TEMPLATES["hermes"]).require_tools()


def test_a_template_for_single_calls_gets_one_at_a_time() -> None:
    """Llama 3's template refuses a turn with two calls, so a second call would make the next
    request fail.
    """
    single = TEMPLATES["llama3_json"].replace(
        "{% for c in m.tool_calls %}",
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one!') }}{% endif %}{% for c in "
        "m.tool_calls %}",
    )
    text = '{"name": "g", "parameters": {}}; {"name": "g", "parameters": {}}'
    assert len(parse(detect(TEMPLATES["llama3_json"]), text).tool_calls) == 2
    assert len(parse(detect(single), text).tool_calls) == 1


def test_marks_that_are_special_tokens_must_not_be_skipped() -> None:
    special, plain = (
        marked_tokenizer(("<tool_call>",)),
        marked_tokenizer(("<tool_call>",), special=False),
    )
    assert detect("<tool_call>", tokenizer=plain).skip_special_tokens
    assert not detect("<tool_call>", tokenizer=special).skip_special_tokens
    assert detect("[TOOL_CALLS]", tokenizer=special).skip_special_tokens
    assert not detect("<tool_call>").skip_special_tokens  # not given by the user
    assert not detect("</think>", tokenizer=marked_tokenizer(("</think>",))).skip_special_tokens


def test_the_bundled_model_calls_tools_in_hermes_form() -> None:
    tokenizer = Tokenizer(find_model_directory("bundled"))
    template = choose_template(tokenizer.chat_templates, None)
    assert detect(template, tokenizer=tokenizer).tool_name == "hermes"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=TOOLS)
    assert TOOLS[0]["function"]["name"] in tokenizer.decode(prompt)
