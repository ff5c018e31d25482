"""The table of answer formats, and the detection of a model's format by the marks in its chat
template.

Must not know: how a format is parsed (see the modules of the families), requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.params import SamplingParams, StructuredOutputsParams
from ..text.chat_template import template_traits
from ..text.template_traits import TemplateTraits
from ..text.tokenizer import Tokenizer
from .forced import Functions, functions_of, write_after_reasoning, write_structure
from .gemma_calls import GemmaCalls
from .grammar_text import GrammarText
from .harmony import ANSWER_ENDS, HarmonyCalls, HarmonyReasoning, header_at_end_of
from .json_calls import JsonCalls, KeyedCalls
from .named_calls import MistralCalls, NamedCalls
from .nested_calls import NAMESPACE, NestedCalls
from .parser import AnswerParser
from .python_calls import PythonCalls
from .reasoning import ReasoningMarks
from .tagged_calls import DsmlCalls, TaggedCalls
from .tool_calls import ToolFormat
from .xtml_calls import ChannelMarks, XtmlCalls

AUTO, NONE, HARMONY = "auto", "none", "harmony"
ANY_OBJECT = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class ToolRow:
    name: str  # value of the flag tool_call_parser
    format: ToolFormat
    texts: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Returns marks that all occur in the templates of models with this format: `texts`, or
        else the mark before its calls.
        """
        return self.texts or tuple(filter(None, [self.format.start]))


DEEPSEEK = (
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = (
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
GLM = (
    ("<tool_call>",),
    "",
    "",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "</tool_call>",
)
HUNYUAN = (
    ("<tool_calls:opensource>", "<tool_call:opensource>"),
    "</tool_calls:opensource>",
    "<tool_sep:opensource>",
    "<arg_key:opensource>",
    "</arg_key:opensource>",
    "<arg_value:opensource>",
    "</arg_value:opensource>",
    "</tool_call:opensource>",
)
DSML = (
    '">',
    '<｜DSML｜parameter name="',
    '"',
    "",
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
)
DSML_V32 = DsmlCalls(
    ("<｜DSML｜function_calls>", '<｜DSML｜invoke name="'), "</｜DSML｜function_calls>", *DSML
)
DSML_V4 = DsmlCalls(
    ("<｜DSML｜tool_calls>", '<｜DSML｜invoke name="'), "</｜DSML｜tool_calls>", *DSML
)
MINIMAX = (
    ("<minimax:tool_call>", '<invoke name="'),
    "</minimax:tool_call>",
    '">',
    '<parameter name="',
    '">',
    "",
    "</parameter>",
    "</invoke>",
)
KIMI_K2 = NamedCalls(*KIMI, call_form="functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS")
LFM2 = PythonCalls(("<|tool_call_start|>",), "<|tool_call_end|>")
QWEN_CODER = (">", "<parameter=", ">", "", "</parameter>", "</function>")
PHI = JsonCalls(("<|tool_call|>", "functools"), "<|/tool_call|>", is_list=True)
LLAMA_JSON = JsonCalls(("<|python_tag|>",), "", "{[", ";", argument_key="parameters")

# The first format whose marks all occur is used, so a format whose marks include another's comes
# before it. Formats without marks are selected only by the flag.
TOOL_FORMATS = (
    ToolRow(HARMONY, HarmonyCalls(), ("<|channel|>", "<|message|>")),
    ToolRow(
        "qwen3_coder",
        TaggedCalls(
            ("<tool_call>", "<function="), "</tool_call>", *QWEN_CODER, values_have_lines=True
        ),
        ("<tool_call>", "<function=", "<parameter="),
    ),
    ToolRow(
        "seed_oss",
        TaggedCalls(("<seed:tool_call>", "<function="), "</seed:tool_call>", *QWEN_CODER),
    ),
    ToolRow("glm47", TaggedCalls(*GLM, padding=""), ("<tool_call>", "</arg_key><arg_value>")),
    ToolRow("glm45", TaggedCalls(*GLM, between_key_and_value="\n"), ("<tool_call>", "<arg_key>")),
    ToolRow("minimax_m2", TaggedCalls(*MINIMAX)),
    ToolRow("minimax_m3", NestedCalls(), (NAMESPACE,)),
    ToolRow("kimi_k3", XtmlCalls(), ChannelMarks().texts),
    # Templates build these marks, with the suffix or from the token.
    ToolRow(
        "hy_v3",
        TaggedCalls(*HUNYUAN, between_key_and_value="\n"),
        ("<tool_sep{}>", ":opensource"),
    ),
    ToolRow("deepseek_v32", DSML_V32, ("｜DSML｜", "function_calls")),
    ToolRow("deepseek_v4", DSML_V4, ("｜DSML｜",)),
    ToolRow("gemma4", GemmaCalls()),
    ToolRow(
        "deepseek_v3",
        NamedCalls(
            *DEEPSEEK, call_form="function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```", between="\n"
        ),
        ("<｜tool▁calls▁begin｜>", "```json"),
    ),
    ToolRow("deepseek_v31", NamedCalls(*DEEPSEEK, call_form="NAME<｜tool▁sep｜>ARGUMENTS")),
    ToolRow("kimi_k2", KIMI_K2),
    ToolRow("kimi_k2", KIMI_K2, ("<|im_system|>tool_declare",)),
    ToolRow("mistral_v11", MistralCalls(name_is_before=True), ("[TOOL_CALLS]", "[ARGS]")),
    ToolRow("mistral", MistralCalls()),
    ToolRow("phi4_mini", PHI, ("<|tool|>", "<|/tool|>")),
    ToolRow("phi4_mini", PHI, ("functools[",)),
    # Since 3.1, Granite's models write the second mark, whose token is no special one.
    ToolRow("granite", JsonCalls(("<|tool_call|>", "<tool_call>"), is_list=True)),
    ToolRow("lfm2", LFM2),
    # LFM2's first templates show how tools are listed, not how they are called.
    ToolRow("lfm2", LFM2, ("<|tool_list_start|>",)),
    ToolRow("lfm2", LFM2, ("List of tools: [", "<|im_start|>")),
    ToolRow("olmo3", PythonCalls(("<function_calls>",), "</function_calls>", call_per_line=True)),
    # Jamba, Hunyuan and MiniMax-M1 use this format.
    ToolRow("tool_calls", JsonCalls(("<tool_calls>",), "</tool_calls>", is_list=True)),
    ToolRow(
        "cohere",
        JsonCalls(
            ("<|START_ACTION|>",),
            "<|END_ACTION|>",
            name_key="tool_name",
            argument_key="parameters",
            is_list=True,
            padding="\n",
        ),
    ),
    ToolRow("apertus", KeyedCalls(("<|tools_prefix|>",), "<|tools_suffix|>")),
    ToolRow("nemotron", JsonCalls(("<TOOLCALL>",), "</TOOLCALL>", is_list=True)),
    ToolRow(
        "internlm",
        JsonCalls(("<|action_start|><|plugin|>",), "<|action_end|>", argument_key="parameters"),
        ("<|action_start|>",),
    ),
    ToolRow("hermes", JsonCalls(("<tool_call>",), "</tool_call>", padding="\n")),
    ToolRow(
        "pythonic", PythonCalls(("<|python_start|>",), "<|python_end|>", "["), ("func_name1(",)
    ),
    ToolRow("llama3_json", LLAMA_JSON, ("dictionary of argument name",)),
    ToolRow("llama3_json", LLAMA_JSON, ("<|python_tag|>",)),
    ToolRow("json", JsonCalls(bare_beginnings="{[", bare_separator=",")),
)

COHERE_THOUGHTS = ("<|START_THINKING|>", "<|END_THINKING|>")
REASONING_FORMATS = {
    HARMONY: HarmonyReasoning(),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>"),
    "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
    "granite33": ReasoningMarks(
        "<think>",
        "</think>",
        content_start="<response>",
        content_end="</response>",
        texts=("</think>", "<response></response>"),
    ),
    "kimi_k3": ChannelMarks(),
    "minimax_m3": ReasoningMarks("<mm:think>", "</mm:think>", may_omit_start=True),
    "think": ReasoningMarks("<think>", "</think>"),
    "hy_v3": ReasoningMarks(
        "<think:opensource>", "</think:opensource>", texts=("</think{}>", ":opensource")
    ),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>"),
    "cohere": ReasoningMarks(
        *COHERE_THOUGHTS,
        content_start="<|START_RESPONSE|>",
        content_end="<|END_RESPONSE|>",
        texts=(COHERE_THOUGHTS[1], "<|START_RESPONSE|>"),
    ),
    "cohere_text": ReasoningMarks(
        *COHERE_THOUGHTS,
        content_start="<|START_TEXT|>",
        content_end="<|END_TEXT|>",
        texts=(COHERE_THOUGHTS[1], "<|START_TEXT|>"),
    ),
    "apertus": ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),
}

# These are vLLM's names for formats that have another name here.
TOOL_ALIASES = {
    "granite4": "hermes",
    "hunyuan_a13b": "tool_calls",
    "jamba": "tool_calls",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "openai": HARMONY,
    "phi4_mini_json": "phi4_mini",
    "qwen3_xml": "qwen3_coder",
}
REASONING_ALIASES = {
    "openai_gptoss": HARMONY,
    **dict.fromkeys(
        (
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v4",
            "glm45",
            "glm47",
            "holo2",
            "kimi_k2",
            "mimo",
            "minimax_m2",
            "nemotron_v3",
            "olmo3",
            "qwen3",
            "step3",
            "step3p5",
        ),
        "think",
    ),
}


@dataclass(frozen=True)
class AnswerFormat:
    """How one model writes its answers."""

    tool_name: str | None  # of the tool-call format; None: unknown
    tool_format: ToolFormat | None
    reasoning_name: str | None
    reasoning_marks: ReasoningMarks | None
    tokenizer: Tokenizer | None = None
    # Whether one answer may have several calls. It is False if the template cannot write them into
    # the next prompt.
    parallel_calls: bool = True
    why_no_tools: str = "cannot be used: this model has no format for calls"

    def require_tools(self) -> ToolFormat:
        """Returns the model's tool format. Raises InvalidParameterError if it has none."""
        if self.tool_format is None:
            raise InvalidParameterError("tools", self.why_no_tools)
        return self.tool_format

    @property
    def skip_special_tokens(self) -> bool:
        """Returns the value that SamplingParams need. It is False if marks that the parser must see
        are, or may be, special tokens.
        """
        marks: list[str] = []
        for format_or_marks in (self.tool_format, self.reasoning_marks):
            for value in vars(format_or_marks).values() if format_or_marks else ():
                if isinstance(value, (str, tuple)):
                    marks += [value] if isinstance(value, str) else value
        if self.tokenizer is None:
            return not any(marks)
        special = [self.tokenizer.added_tokens[i] for i in self.tokenizer.special_ids]
        return not any(token in mark for token in special for mark in marks)

    @property
    def is_harmony(self) -> bool:
        return HARMONY in (self.tool_name, self.reasoning_name)

    @property
    def stop_token_ids(self) -> list[int]:
        """Returns the tokens that end an answer of this format, whether or not the model's
        configuration lists them among its end-of-sequence tokens.
        """
        ends = ANSWER_ENDS if self.is_harmony else ()
        if not ends and self.tool_format is not None:
            ends = self.tool_format.answer_ends
        if not ends or self.tokenizer is None:
            return []
        return [i for i, text in self.tokenizer.added_tokens.items() if text in ends]

    def adapt(self, params: SamplingParams) -> SamplingParams:
        """Returns `params` with the marks in the text, and with the ends of an answer."""
        if not self.skip_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        if (ends := self.stop_token_ids) and not params.ignore_eos:
            stop_token_ids = [*(params.stop_token_ids or ()), *ends]
            params = msgspec.structs.replace(params, stop_token_ids=stop_token_ids)
        return params

    def parser(
        self,
        tools: list[dict[str, Any]] | None = None,
        prompt_text: str = "",
        parallel_tool_calls: bool = True,
        calls_are_valid: bool = False,
        continued: str = "",
    ) -> AnswerParser:
        """Makes the parser of one completion.

        `tools` are in the form of OpenAI's chat API; their schemas give types that some formats do
        not write. With None or [], no text is parsed as a call. `prompt_text` is the rendered
        prompt, whose end may begin the reasoning. Without `parallel_tool_calls` only the first call
        is returned. With `calls_are_valid`, for answers under the grammar of `forced`, arguments
        are passed on before their call is whole. `continued` is the beginning of the answer, if the
        prompt ends with it.
        """
        schemas = dict(functions_of(tools or []))
        marks = self.reasoning_marks
        return AnswerParser(
            self.tool_format if tools else None,
            marks,
            schemas,
            begins_in_reasoning=marks is not None and marks.is_open_at_end_of(prompt_text),
            is_within_reasoning=marks is not None and marks.has_text_open_in(continued),
            begins_in_content=marks is not None and marks.is_content_open_at_end_of(prompt_text),
            max_calls=None if parallel_tool_calls and self.parallel_calls else 1,
            harmony_header=header_at_end_of(prompt_text) if self.is_harmony else None,
            calls_are_valid=calls_are_valid,
        )

    def prompt_before(self, prompt_text: str, continued: str) -> str:
        """Returns what `parser` and the grammars receive for a prompt that ends with the text of
        the message to be continued: that reasoning is open, if the message leaves it open.
        """
        marks = self.reasoning_marks
        if marks is None or self.is_harmony or not marks.is_left_open_in(continued):
            return prompt_text
        return marks.start

    def forced(
        self,
        tools: list[dict[str, Any]],
        tool_choice: Any,
        *,
        parallel_tool_calls: bool = True,
        prompt_text: str = "",
        compact_json: bool = False,
    ) -> StructuredOutputsParams | None:
        """Returns the structured output that forces the tool calls `tool_choice` asks for, in the
        model's own format.

        `tool_choice` is "required", or {"name": ...} for one of `tools`, possibly within
        {"function": ...}; None is returned for "auto" and "none". Arguments follow the tool's
        schema. A named function is called once, as is any function without `parallel_tool_calls`.
        The model reasons first if its prompt allows it. With `compact_json`, JSON arguments have no
        whitespace. Raises InvalidParameterError for a model that cannot call tools.
        """
        if tool_choice in ("auto", "none"):
            return None
        tool_format = self.require_tools()
        functions = functions_of(tools)
        if isinstance(tool_choice, dict):
            wanted = tool_choice.get("function", tool_choice)["name"]
            functions = [(name, schema) for name, schema in functions if name == wanted]
        grammar = self._grammar(compact_json)
        parallel = parallel_tool_calls and self.parallel_calls and not isinstance(tool_choice, dict)
        calls = self._written_calls(tool_format, grammar, functions, parallel, prompt_text)
        return self._finished(grammar, calls, prompt_text)

    def strict(
        self,
        tools: list[dict[str, Any]],
        *,
        parallel_tool_calls: bool = True,
        prompt_text: str = "",
        compact_json: bool = False,
    ) -> StructuredOutputsParams | None:
        """Returns the structured output that constrains voluntary calls of `strict` tools to their
        schemas.

        Text between calls is free. The result is None if no tool is strict, or if calls have no
        mark at their start.
        """
        is_strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict")}
        if not is_strict or self.tool_format is None or not self.tool_format.start:
            return None
        grammar, parallel = self._grammar(compact_json), parallel_tool_calls and self.parallel_calls
        functions = [
            (name, schema if name in is_strict else ANY_OBJECT)
            for name, schema in functions_of(tools)
        ]
        answer = self.tool_format.write_voluntary(grammar, functions, parallel)
        return self._finished(grammar, answer, prompt_text)

    def after_reasoning(
        self,
        params: StructuredOutputsParams,
        prompt_text: str,
        *,
        tools: list[dict[str, Any]] | None = None,
        parallel_tool_calls: bool = True,
        compact_json: bool = False,
    ) -> StructuredOutputsParams:
        """Returns the same structure for a model that may reason first, or call `tools` instead.

        Without this the structure would begin within the reasoning, and no tool could be called.
        """
        marks = self.reasoning_marks
        if marks is not None and marks.is_closed_at_end_of(prompt_text):
            marks = None
        calls = self.tool_format if tools else None
        if marks is None and calls is None:
            return params
        grammar = self._grammar(compact_json)
        answer = write_structure(grammar, params)
        if marks is not None:
            answer = marks.write_content(grammar, answer)
        if calls is not None and tools:
            parallel = parallel_tool_calls and self.parallel_calls
            functions = functions_of(tools)
            call = self._written_calls(calls, grammar, functions, parallel, prompt_text)
            answer = grammar.any_of([answer, call])
        return self._finished(grammar, answer, prompt_text)

    def _written_calls(
        self,
        tool_format: ToolFormat,
        grammar: GrammarText,
        functions: Functions,
        parallel: bool,
        prompt_text: str,
    ) -> str:
        """Writes a grammar for calls with the mark before the first."""
        marks, calls = self.reasoning_marks, tool_format.write(grammar, functions, parallel)
        before = "" if marks is None else marks.write_before_calls(grammar, prompt_text)
        return f"{before} {grammar.literal(tool_format.start)} {calls}"

    def _grammar(self, compact_json: bool) -> GrammarText:
        added_tokens = self.tokenizer.added_tokens if self.tokenizer else {}
        return GrammarText({text: i for i, text in added_tokens.items()}, compact_json)

    def _finished(
        self, grammar: GrammarText, answer: str, prompt_text: str
    ) -> StructuredOutputsParams:
        return StructuredOutputsParams(
            grammar=grammar.finished(
                write_after_reasoning(grammar, answer, self.reasoning_marks, prompt_text)
            )
        )


def detect(
    chat_template: str | None,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    tokenizer: Tokenizer | None = None,
) -> AnswerFormat:
    """Detects the format of a model.

    The two names override what its template shows; "none" disables tool calls or reasoning. vLLM's
    names are known as well. `tokenizer` tells which marks are tokens.

    Raises InvalidParameterError for an unknown name.
    """
    template = chat_template or ""
    tool_formats = {row.name: row.format for row in TOOL_FORMATS}
    rows = (row for row in TOOL_FORMATS if row.marks and all(m in template for m in row.marks))
    tool_name = _chosen(
        "tool_call_parser",
        TOOL_ALIASES.get(tool_call_parser, tool_call_parser),
        tool_formats,
        (row.name for row in rows),
    )
    reasoning_name = _chosen(
        "reasoning_parser",
        REASONING_ALIASES.get(reasoning_parser, reasoning_parser),
        REASONING_FORMATS,
        (
            name
            for name, marks in REASONING_FORMATS.items()
            if marks.is_shown_in(template) or name == tool_name == HARMONY
        ),
    )
    traits = template_traits(chat_template) if chat_template else None
    return AnswerFormat(
        tool_name,
        tool_formats[tool_name] if tool_name else None,
        reasoning_name,
        REASONING_FORMATS[reasoning_name] if reasoning_name else None,
        tokenizer,
        parallel_calls=traits is None or traits.takes_several_calls,
        why_no_tools=_why_no_tools(traits, tool_call_parser),
    )


def _chosen(
    parameter: str, wanted: str, known: Collection[str], detected: Iterator[str]
) -> str | None:
    """Returns the name `wanted`, or for "auto" the first detected one. It returns None for "none",
    or if none is detected.
    """
    if wanted in (AUTO, NONE):
        return next(detected, None) if wanted == AUTO else None
    if wanted not in known:
        raise InvalidParameterError(
            parameter, f"must be one of {', '.join([AUTO, NONE, *known])}, got {wanted!r}"
        )
    return wanted


def _why_no_tools(traits: TemplateTraits | None, tool_call_parser: str) -> str:
    """Returns the reason why no format was found."""
    if tool_call_parser == NONE:
        return "are disabled (tool_call_parser is none)"
    if traits is None:
        return "cannot be used: this model has no chat template"
    if not traits.takes_tools:
        return "cannot be used: the chat template of this model does not write them into the prompt"
    names = ", ".join(dict.fromkeys(row.name for row in TOOL_FORMATS))
    return (
        f"cannot be used: the chat template does not show how this model writes calls; set "
        f"tool_call_parser to one of {names}"
    )
