"""The table of formats, and which of them a model uses: recognised by the marks in its chat template.
May know: the marks of the models' formats, chat templates as text.
Must not know: how a format is read (the modules of the families do), requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...ipc.errors import InvalidParameterError
from .json_calls import JsonCalls
from .parser import AnswerParser, ReasoningMarks
from .tool_calls import ToolFormat

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ToolRow:
    name: str  # of the flag tool_call_parser
    marks: tuple[str, ...]  # all of them stand in the templates of the models that write so
    format: ToolFormat


# The first whose marks are all there: a format whose marks include another's stands before it.
TOOL_FORMATS = (ToolRow("hermes", ("<tool_call>",), JsonCalls(starts=("<tool_call>",), end="</tool_call>")),)

REASONING_FORMATS = {"think": ReasoningMarks("<think>", "</think>")}


@dataclass(frozen=True)
class AnswerFormat:
    """How one model writes its answers."""

    tool_name: str | None  # of the format of its tool calls; None: none is known
    tool_format: ToolFormat | None
    reasoning_name: str | None
    reasoning_marks: ReasoningMarks | None
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def skip_special_tokens(self) -> bool:
        """What SamplingParams must say: False where special tokens are marks that the parser must see."""
        marks = [*self.tool_format.starts] if self.tool_format else []
        if self.reasoning_marks:
            marks += [self.reasoning_marks.start, self.reasoning_marks.end]
        return not any(mark in self.special_tokens for mark in marks)

    def parser(
        self, tools: list[dict[str, Any]] | None = None, reasoning: bool = True, prompt_text: str = "", parallel_tool_calls: bool = True
    ) -> AnswerParser:
        """For one completion. `tools` as in OpenAI's chat API (their schemas give the types that some formats do not write down);
        None or []: nothing is taken for a call. `reasoning` False: reasoning stays in the content, with its marks. `prompt_text`: the
        rendered prompt, whose end may have begun the reasoning. Without `parallel_tool_calls` only the first call is handed on."""
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or []}
        marks = self.reasoning_marks if reasoning else None
        return AnswerParser(
            self.tool_format if tools else None,
            marks,
            schemas,
            begins_in_reasoning=marks is not None and marks.is_open_at_end_of(prompt_text),
            max_calls=None if parallel_tool_calls else 1,
        )


def detect(
    chat_template: str | None, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO, special_tokens: Mapping[str, int] | None = None
) -> AnswerFormat:
    """The format of a model. The two names override what its template shows; "none" turns the search for calls or reasoning off.

    `special_tokens`: the tokenizer's, text -> id. Raises InvalidParameterError for a name that no format has.
    """
    row = _tool_row(chat_template or "", tool_call_parser)
    reasoning_name = _reasoning_name(chat_template or "", reasoning_parser)
    marks = REASONING_FORMATS[reasoning_name] if reasoning_name else None
    return AnswerFormat(row and row.name, row and row.format, reasoning_name, marks, special_tokens or {})


def _tool_row(template: str, wanted: str) -> ToolRow | None:
    if wanted == NONE:
        return None
    if wanted == AUTO:
        return next((row for row in TOOL_FORMATS if all(mark in template for mark in row.marks)), None)
    rows = {row.name: row for row in TOOL_FORMATS}
    if wanted not in rows:
        raise InvalidParameterError("tool_call_parser", f"must be one of {', '.join([AUTO, NONE, *rows])}, got {wanted!r}")
    return rows[wanted]


def _reasoning_name(template: str, wanted: str) -> str | None:
    if wanted == NONE:
        return None
    if wanted == AUTO:
        return next((name for name, marks in REASONING_FORMATS.items() if marks.end in template), None)
    if wanted not in REASONING_FORMATS:
        raise InvalidParameterError("reasoning_parser", f"must be one of {', '.join([AUTO, NONE, *REASONING_FORMATS])}, got {wanted!r}")
    return wanted
