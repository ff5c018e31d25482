"""Required tool calls: every string that a format's grammar accepts parses into valid calls.

The full run covers three thousand random schemas and takes some minutes:

    pytest -m slow tests/frontend/answer_format/test_forced.py
"""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from quire import LLM, InvalidParameterError, SamplingParams, StructuredOutputsParams
from quire.executor.sampling.grammar_compiler import GrammarCompiler, normalize
from quire.frontend.answer_format import AnswerFormat, collect, detect
from quire.frontend.answer_format.forced import functions_of
from quire.frontend.answer_format.formats import TOOL_FORMATS
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.frontend.answer_format.cuts import function, parse
from quire.tests.frontend.answer_format.grammars import accepts, marked_tokenizer
from quire.tests.structured.generator import FORMAT_CHECKER, random_schema

WEATHER = function(
    "weather",
    city={"type": "string", "enum": ["Paris", "New York"]},
    days={"type": "integer", "maximum": 14},
    hot="boolean",
)
WEATHER["function"]["parameters"]["required"] = ["city"]
POINTS = function(
    "points",
    a={"type": "array", "items": {"$ref": "#/$defs/P"}, "maxItems": 2},
    s={"type": "string", "maxLength": 8},
)
POINTS["function"]["parameters"] |= {
    "required": ["a", "s"],
    "$defs": {
        "P": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "additionalProperties": False,
        }
    },
}
CHOICE = function(
    "choice",
    o={"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    k={"enum": [1, 2]},
)
NOW = {"type": "function", "function": {"name": "now"}}
WRITE = function("write", text="string")
WRITE["function"]["parameters"]["required"] = ["text"]
TOOLS = [WEATHER, POINTS, CHOICE, NOW]
NAMES = list(dict.fromkeys(row.name for row in TOOL_FORMATS))
REQUIRED = (TOOLS, "required")

# How models of each format write two calls, weather(city="Paris", days=3) and now().
WRITTEN = {
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>"
    ),
    "glm47": (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        "<tool_call>now</tool_call>"
    ),
    "gemma4": (
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:now{}'
        "<tool_call|>"
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>\n"
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
    "deepseek_v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n"
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>\n'
        '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">'
        "]<]minimax[>[<city>Paris]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>"
        ']<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n'
        "]<]minimax[>[</tool_call>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris", "days": '
        "3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": '
        '"Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>"
        'functions.weather:0<|tool_call_argument_begin|>{"city": "Paris", "days": '
        "3}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral_v11": '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}',
    "lfm2": '<|tool_call_start|>[weather(city="Paris", days=3), now()]<|tool_call_end|>',
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": '
        "3}}\n</tool_call>\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "hy_v3": (
        "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris"
        "</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n"
        "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>\n<tool_calls:opensource>\n<tool_call:opensource>now"
        "<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"
    ),
    "cohere": (
        '<|START_ACTION|>\n[{"tool_name": "weather", "parameters": {"city": "Paris", "days": 3}}, '
        '{"tool_name": "now", "parameters": {}}]\n<|END_ACTION|>'
    ),
    "apertus": (
        '<|tools_prefix|>[{"weather": {"city": "Paris", "days": 3}}, {"now": {}}]<|tools_suffix|>'
    ),
    "pythonic": '[weather(city="Paris", days=3), now()]',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; {"name": '
    '"now", "parameters": {}}',
}
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "｜DSML｜",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "]<]minimax[>[",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
)


SETTINGS = dict(
    engine="inproc",
    num_threads=1,
    dtype="float32",
    max_num_seqs=64,
    max_model_len=256,
    num_gpu_blocks_override=1 + 64 * 16,
)


def assert_calls(answer_format: AnswerFormat, text: str, parallel: bool = True) -> None:
    """The whole text consists of valid calls."""
    answer = parse(answer_format, text, TOOLS)
    assert answer.content == "" and (
        len(answer.tool_calls) == 1 or (parallel and answer.tool_calls)
    ), text
    schemas = dict(functions_of(TOOLS))
    for call in answer.tool_calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def drawn(tokenizer: Tokenizer, params: StructuredOutputsParams, seed: int) -> list[int]:
    """Token ids up to the end of the grammar, those that it forces and random ones."""
    compiler = GrammarCompiler(
        str(tokenizer.directory), tokenizer.vocab_size, tokenizer.eos_token_id
    )
    matcher, draw, token_ids = compiler.compile(normalize(params)), random.Random(seed), []
    while not matcher.is_accepting():
        assert not matcher.is_error() and len(token_ids) < 2000, matcher.get_error()
        more = matcher.compute_ff_tokens() or [int(draw.choice(compiler._timed_mask(matcher)))]
        assert matcher.consume_tokens(more)
        token_ids += more
    return token_ids


@pytest.mark.parametrize("marks", [(), MARKS], ids=["as text", "as tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_special_token_is_characters_in_calls(name, marks) -> None:
    tokenizer = marked_tokenizer(marks)
    answer_format = detect("", name, "none", tokenizer)
    text = "a<|im_end|><|im_start|>b"
    tool = function("f", x={"type": "string", "enum": [text]}, y={"enum": [text, "<|im_end|>"]})
    tool["function"]["parameters"]["required"] = ["x", "y"]
    special = {tokenizer.eos_token_id, *tokenizer.special_ids} - {
        i for i, mark in tokenizer.added_tokens.items() if mark in marks
    }
    for seed in range(2):
        params = answer_format.forced([tool], "required", parallel_tool_calls=False)
        token_ids = drawn(tokenizer, params, seed)
        assert special and special.isdisjoint(token_ids)
        written = tokenizer.backend.decode(token_ids, skip_special_tokens=False)
        (call,) = parse(answer_format, written, [tool]).tool_calls
        arguments = json.loads(call.arguments)
        assert arguments["x"] == text and arguments["y"] in (text, "<|im_end|>")


@pytest.mark.parametrize(
    "structure",
    [
        dict(choice=["<|im_end|>"]),
        dict(regex=r"<\|im_end\|>"),
        dict(grammar='start: "<|im_end|>"'),
        dict(json={"enum": ["<|im_end|>"]}),
    ],
    ids=str,
)
def test_the_text_of_a_special_token_is_characters_after_reasoning(structure) -> None:
    tokenizer = marked_tokenizer(MARKS)
    answer_format = detect("</think>", tokenizer=tokenizer)
    params = answer_format.after_reasoning(StructuredOutputsParams(**structure), "…<think>\n")
    for seed in range(3):
        token_ids = drawn(tokenizer, params, seed)
        assert tokenizer.eos_token_id not in token_ids
        written = tokenizer.backend.decode(token_ids, skip_special_tokens=False)
        assert written.rpartition("</think>")[2].strip().strip('"') == "<|im_end|>"


@pytest.mark.parametrize("marks", [(), MARKS], ids=["as text", "as tokens"])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_models_own_format(name, marks) -> None:
    tokenizer = marked_tokenizer(marks)
    answer_format = detect("", name, tokenizer=tokenizer)
    text = WRITTEN[name]
    answer = parse(answer_format, text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [
        ("weather", {"city": "Paris", "days": 3}),
        ("now", {}),
    ]
    assert accepts(tokenizer, answer_format.forced(*REQUIRED), text)
    assert not accepts(tokenizer, answer_format.forced(*REQUIRED, parallel_tool_calls=False), text)
    assert not accepts(tokenizer, answer_format.forced(*REQUIRED), text.replace("Paris", "London"))
    assert not accepts(tokenizer, answer_format.forced(*REQUIRED), "Hello")
    only_now = answer_format.forced(TOOLS, {"name": "now"})
    assert not accepts(tokenizer, only_now, text)
    if name == "hermes":
        once = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        assert accepts(tokenizer, only_now, once) and not accepts(
            tokenizer, only_now, f"{once}\n{once}"
        )


@pytest.fixture(scope="module")
def outputs() -> list:
    """Return (format, several calls?, completion) of the bundled model under the grammar of every
    format.
    """
    asked = [
        (detect("", name), parallel, seed)
        for name in NAMES
        for parallel, seed in ((False, 1), (False, 2), (True, 3))
    ]
    params = [
        SamplingParams(
            max_tokens=160,
            temperature=(0.0, 0.8, 1.5)[seed % 3],
            seed=seed,
            structured_outputs=f.forced(*REQUIRED, parallel_tool_calls=parallel),
        )
        for f, parallel, seed in asked
    ]
    with LLM(**SETTINGS) as llm:
        answers = llm.generate(["Answer: "] * len(asked), params, use_tqdm=False)
    return [
        (f, parallel, answer.outputs[0])
        for (f, parallel, _), answer in zip(asked, answers, strict=True)
    ]


@pytest.mark.slow
def test_calls_of_the_bundled_model_parse(outputs) -> None:
    finished = [
        (f, parallel, completion)
        for f, parallel, completion in outputs
        if completion.finish_reason == "stop"
    ]
    assert len(finished) > 0.6 * len(outputs), [
        completion.finish_reason for _, _, completion in outputs
    ]
    assert {f.tool_name for f, _, _ in finished} == set(NAMES)
    for answer_format, parallel, completion in finished:
        assert_calls(answer_format, completion.text, parallel)


def test_truncated_calls_begin_as_calls(outputs) -> None:
    for answer_format, _, completion in outputs:
        parser = answer_format.parser(TOOLS)
        answer = collect(parser.feed(completion.text) + parser.finish())
        assert answer.tool_calls or completion.finish_reason == "length", completion.text


def random_tool(seed: int) -> dict:
    rng = random.Random(seed)
    keys = rng.sample(["name", "age", "kind", "a-b", "last name", "é", 'q"q'], rng.randint(0, 3))
    schema = {
        "type": "object",
        "properties": {key: random_schema(rng, 1) for key in keys},
        "required": rng.sample(keys, rng.randint(0, len(keys))),
    }
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def check_random_schemas(first: int, count: int) -> None:
    """Check every format in turn with one schema each. Every finished output is one call with valid
    arguments, whole and streamed.
    """
    items = [
        (detect("", NAMES[seed % len(NAMES)]), random_tool(seed), seed)
        for seed in range(first, first + count)
    ]
    params = [
        SamplingParams(
            max_tokens=120,
            temperature=(0.5, 1.0, 2.0)[seed % 3],
            seed=seed,
            structured_outputs=f.forced([tool], "required", parallel_tool_calls=False),
        )
        for f, tool, seed in items
    ]
    with LLM(**SETTINGS) as llm:
        answers = llm.generate(["Answer: "] * count, params, use_tqdm=False)
    num_finished = 0
    for (answer_format, tool, seed), answer in zip(items, answers, strict=True):
        completion = answer.outputs[0]
        assert completion.finish_reason in ("stop", "length"), (
            seed,
            answer_format.tool_name,
            tool,
            answer.error,
        )
        if completion.finish_reason == "stop":
            num_finished += 1
            read = parse(answer_format, completion.text, [tool])
            assert read.content == "" and len(read.tool_calls) == 1, (seed, completion.text)
            arguments = json.loads(read.tool_calls[0].arguments)
            validator = jsonschema.Draft202012Validator(
                tool["function"]["parameters"], format_checker=FORMAT_CHECKER
            )
            errors = [error.message for error in validator.iter_errors(arguments)]
            assert not errors, (seed, answer_format.tool_name, completion.text, tool)
    print(f"\n{num_finished} of {count} calls finished")
    assert num_finished > 0.6 * count


def test_random_schemas() -> None:
    check_random_schemas(0, 24)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 4000, 1000))
def test_three_thousand_random_schemas(first) -> None:
    check_random_schemas(first, 1000)


def test_free_text_in_tags() -> None:
    answer_format = detect("", "qwen3_coder", tokenizer=marked_tokenizer())
    text = (
        '<tool_call>\n<function=write>\n<parameter=text>\nOne <b>\n\n"two"\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    assert accepts(marked_tokenizer(), answer_format.forced([WRITE], "required"), text)
    assert json.loads(parse(answer_format, text, [WRITE]).tool_calls[0].arguments) == {
        "text": 'One <b>\n\n"two"'
    }


# ---------------------------------------------------------------- reasoning before the calls


@pytest.mark.parametrize("marks", [(), MARKS], ids=["as text", "as tokens"])
def test_reasoning_comes_first_if_the_prompt_allows_it(marks) -> None:
    tokenizer = marked_tokenizer(marks)
    answer_format = detect("<tool_call></think>", tokenizer=tokenizer)
    call = WRITTEN["hermes"]
    cases = [  # prompt, output, accepted
        ("…<think>\n", f"Hm.\n</think>\n\n{call}", True),
        ("…<think>\n", call, False),
        ("", f"<think>\nHm.\n</think>\n\n{call}", True),
        ("", call, True),
        ("…<think>\n\n</think>\n\n", call, True),
        ("…<think>\n\n</think>\n\n", f"<think>\n</think>\n\n{call}", False),
    ]
    for prompt, text, is_accepted in cases:
        assert (
            accepts(tokenizer, answer_format.forced(*REQUIRED, prompt_text=prompt), text)
            is is_accepted
        ), (prompt, text)
        if is_accepted:
            assert len(parse(answer_format, text, TOOLS, prompt_text=prompt).tool_calls) == 2


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (dict(json={"type": "integer"}), "5", '"5"'),
        (
            dict(
                json='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": '
                '["a"]}',
                disable_any_whitespace=True,
            ),
            '{"a":1}',
            '{"a": 1}',
        ),
        (dict(json="true"), '{"a": [1]}', '{"a":  [1]}'),
        (dict(json_object=True), '{"a": [1]}', "[]"),
        (dict(json_object=True), '{\n  "a": [1]\n}', '{"a":  [1]}'),
        (dict(json={"x-guidance": {"whitespace_pattern": "\t"}}), "[1,\t2]", "[1, 2]"),
        (dict(regex="[0-9]+/[0-9]+"), "1/2", "1"),
        (dict(choice=["yes", "no"]), "yes", "maybe"),
        (dict(grammar='start: "a" b\nb: "b"'), "ab", "a"),
    ],
    ids=str,
)
def test_a_structure_after_reasoning(structure, good, bad) -> None:
    tokenizer = marked_tokenizer(MARKS)
    answer_format, params = (
        detect("</think>", tokenizer=tokenizer),
        StructuredOutputsParams(**structure),
    )
    thinking = answer_format.after_reasoning(params, "…<think>\n")
    assert accepts(tokenizer, thinking, f"Hm.\n</think>\n\n{good}")
    assert not accepts(tokenizer, thinking, f"Hm.\n</think>\n\n{bad}") and not accepts(
        tokenizer, thinking, good
    )
    assert answer_format.after_reasoning(params, "…<think>\n\n</think>\n\n") is params
    assert detect("").after_reasoning(params, "<think>") is params


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize("marks", [(), MARKS], ids=["as text", "as tokens"])
@pytest.mark.parametrize(
    "name", [name for name in WRITTEN if name not in ("pythonic", "llama3_json")]
)
def test_strict_tools_constrain_only_the_calls(name, marks) -> None:
    """With `strict` and tool_choice "auto" the model may write any text, but calls must match the
    schema.
    """
    tokenizer = marked_tokenizer(marks)
    answer_format = detect("", name, tokenizer=tokenizer)
    strict = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, NOW]
    params = answer_format.strict(strict)
    text = WRITTEN[name]
    for accepted in ("Hello, <b>you</b>!\n", "", text, f"Let me see.\n{text}", f"{text}\nDone"):
        assert accepts(tokenizer, params, accepted), accepted
    for refused in (
        text.replace("Paris", "London"),
        f"Well. {text.replace('now', 'then')}",
        f"Well. {answer_format.tool_format.start} well",
    ):
        assert not accepts(tokenizer, params, refused), refused
    assert not accepts(tokenizer, answer_format.strict(strict, parallel_tool_calls=False), text)


def test_unsupported_strict_tools() -> None:
    strict = [{**NOW, "function": {"name": "now", "strict": True}}]
    assert detect("", "hermes").strict(TOOLS) is None  # no tool is strict
    assert detect("", "llama3_json").strict(strict) is None and detect("").strict(strict) is None
    assert detect("</think>", "hermes").strict(strict) is not None


def test_a_structure_or_calls() -> None:
    """response_format with tools that may be called."""
    tokenizer = marked_tokenizer(MARKS)
    answer_format = detect("", "hermes", tokenizer=tokenizer)
    either = answer_format.after_reasoning(
        StructuredOutputsParams(json={"type": "integer"}), "", tools=TOOLS
    )
    assert accepts(tokenizer, either, "5") and accepts(tokenizer, either, WRITTEN["hermes"])
    assert not accepts(tokenizer, either, "Hello")


def test_requests_that_force_nothing() -> None:
    assert detect("", "hermes").forced(TOOLS, "auto") is None
    assert detect("", "hermes").forced([], "none") is None
    with pytest.raises(
        InvalidParameterError, match="tools: cannot be used: this model has no chat template"
    ):
        detect("").forced(*REQUIRED)
