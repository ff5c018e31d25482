"""The detection of a format from the template, its overrides, and that the output of each template
is parsed back.
"""

from __future__ import annotations

import json

import pytest
from quire import InvalidParameterError, SamplingParams, StructuredOutputsParams
from quire.frontend.answer_format import ParsedAnswer, ParsedToolCall, detect
from quire.frontend.answer_format.formats import (
    REASONING_ALIASES,
    TOOL_ALIASES,
    TOOL_FORMATS,
)
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.text.chat_template import choose_template, render_chat
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.frontend.answer_format.cuts import function, parse
from quire.tests.frontend.answer_format.grammars import accepts, marked_tokenizer
from quire.tests.frontend.answer_format.templates import STOCK, TEMPLATES


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
    ParsedToolCall(
        "get_weather", '{"city": "New \\"York\\"\\n{}", "days": 3, "units": ["C", {"é": null}]}'
    ),
    ParsedToolCall("f", '{"flag": true, "ratio": -0.5}'),
    ParsedToolCall("g", "{}"),
]
SINGLE = {"flag": "boolean", "ratio": "number"}
TOOLS = [
    function("get_weather", city="string", days="integer", units="array"),
    function("f", **SINGLE),
    function("g"),
]


def turn(calls: list[ParsedToolCall], content: str | None) -> dict:
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
    calls = calls if answer_format.parallel_calls else calls[:1]
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
    assert parse(detect(template), text) == ParsedAnswer("Sunny.", "Hm, <tool_call>?")


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


@pytest.mark.parametrize("family", STOCK)
def test_the_models_of_a_family(family) -> None:
    """Their template is recognised, with reasoning on and off, and so are calls as they write
    them.
    """
    template, switch, call, tool_name, reasoning_name = STOCK[family]
    answer_format = detect(template)
    assert (answer_format.tool_name, answer_format.reasoning_name) == (tool_name, reasoning_name)
    tools, user = [function("f", a="string", n="integer")], {"role": "user", "content": "Hi"}
    called = [("f", {"a": "x", "n": 2})]

    def read(text: str, prompt: str) -> tuple[str, str, list]:
        answer = parse(answer_format, text, tools, prompt_text=prompt)
        calls = [(one.name, json.loads(one.arguments)) for one in answer.tool_calls]
        return answer.reasoning, answer.content, calls

    def prompt(is_on: bool) -> str:
        variables = {switch: is_on} if switch else {}
        return render_chat(
            template, [user], tools=tools, add_generation_prompt=True, variables=variables
        )

    marks = answer_format.reasoning_marks
    if marks is not None:
        on = prompt(True)
        begun = "" if marks.is_open_at_end_of(on) else f"{marks.start}\n"
        assert read(f"{begun}Hm.{marks.end}\n\nWell. {call}", on) == ("Hm.", "Well.", called)
        assert read(f"{begun}Hm.", on) == ("Hm.", "", [])
    assert read(f"Well.\n{call}", prompt(False) if switch else "") == ("", "Well.", called)
    if switch:
        assert marks.is_closed_at_end_of(prompt(False))
        assert not marks.is_closed_at_end_of(prompt(True))


def test_granites_answer_stands_between_tags() -> None:
    granite = detect(STOCK["Granite 3.3"][0])
    text = "<think>Hm.</think>\n<response>Yes <b>.</response>"
    for tools in (TOOLS, []):
        assert parse(granite, text, tools) == ParsedAnswer("Yes <b>.", "Hm.")
        assert parse(granite, f"{text} More </response>", tools) == ParsedAnswer(
            "Yes <b>. More </response>", "Hm."
        )
        assert parse(granite, "<response>Yes", tools) == ParsedAnswer("Yes")
        assert parse(granite, "A <response> tag", tools) == ParsedAnswer("A <response> tag")
    called = parse(granite, f'{text}<|tool_call|>[{{"name": "g", "arguments": {{}}}}]')
    assert called == ParsedAnswer("Yes <b>.", "Hm.", [ParsedToolCall("g", "{}")])
    older = detect("", "granite", "granite")
    assert parse(
        older, "Here is my thought process: Hm.\n\nHere is my response: Yes."
    ) == ParsedAnswer("Yes.", "Hm.")


@pytest.mark.parametrize(("alias", "name"), [*TOOL_ALIASES.items(), ("gemma4", "gemma4")])
def test_vllms_names_of_tool_parsers(alias, name) -> None:
    assert detect("", alias).tool_name == name


@pytest.mark.parametrize("alias", REASONING_ALIASES)
def test_vllms_names_of_reasoning_parsers(alias) -> None:
    expected = "harmony" if alias == "openai_gptoss" else "think"
    assert detect("", "none", alias).reasoning_name == expected


def test_gemma_ends_where_it_waits_for_results() -> None:
    tokenizer = marked_tokenizer(("<|tool_response>", '<|"|>'))
    answer_format = detect("", "gemma4", tokenizer=tokenizer)
    params = answer_format.adapt(SamplingParams(stop_token_ids=[1]))
    assert [tokenizer.decode([i], False) for i in params.stop_token_ids[1:]] == ["<|tool_response>"]
    assert not params.skip_special_tokens


def test_a_structure_begins_after_the_reasoning_that_the_prompt_left_open() -> None:
    tokenizer = marked_tokenizer()
    answer_format = detect("</think>", tokenizer=tokenizer)
    asked = StructuredOutputsParams(json={"type": "integer"})
    for begun, accepted, refused in (
        ("<think>I thi", "nk.</think>\n5", "5"),
        ("<think>Hm.</think>", "5", "nk.</think>\n5"),
    ):
        before = answer_format.prompt_before(f"assistant: {begun}", begun)
        params = answer_format.after_reasoning(asked, before)
        assert accepts(tokenizer, params, accepted), begun
        assert not accepts(tokenizer, params, refused), begun
