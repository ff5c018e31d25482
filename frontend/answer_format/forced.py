"""Grammars that force tool calls, and grammars that constrain the answer after the reasoning.

Must not know: which format it is (formats write their own calls), the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ...ipc.json_schemas import closed_schema
from ...ipc.params import StructuredOutputsParams
from .grammar_text import GrammarText
from .reasoning import ReasoningMarks

Functions = list[tuple[str, dict[str, Any]]]  # name, schema of the arguments

SPACE = r"[ \n]{0,4}"  # whitespace that a model may write after its reasoning


def functions_of(tools: list[dict[str, Any]]) -> Functions:
    """Returns the names and schemas of tools in the form of OpenAI's chat API."""
    return [(tool["function"]["name"], tool["function"].get("parameters") or {}) for tool in tools]


def write_json_calls(
    grammar: GrammarText,
    functions: Functions,
    parallel: bool,
    before: Callable[[str], str],
    after: str,
    frame: tuple[str, str, str] = ("", "", ""),
) -> str:
    """Writes a grammar for calls that consist of a text with the name, the JSON of the arguments,
    and a text.

    `frame` is the text before the first call, between two calls, and after the last.
    """
    calls = [
        f"{grammar.literal(before(name))} {grammar.arguments(schema)} {grammar.literal(after)}"
        for name, schema in functions
    ]
    return write_repeated(grammar, calls, parallel, frame)


def write_json_call(
    grammar: GrammarText, name: str, schema: dict[str, Any], argument_key: str, closing: str = "}"
) -> str:
    """Writes a grammar for a call as one JSON object."""
    before = grammar.literal(f'{{"name": {json.dumps(name)}, "{argument_key}": ')
    return f"{before} {grammar.arguments(schema)} {grammar.literal(closing)}"


def write_repeated(
    grammar: GrammarText, calls: list[str], parallel: bool, frame: tuple[str, str, str]
) -> str:
    opening, between, closing = map(grammar.literal, frame)
    call = grammar.any_of(calls)
    return f"{opening} {call} {f'({between} {call})*' if parallel else ''} {closing}"


def write_listed(grammar: GrammarText, written: list[tuple[str, bool]], comma: str) -> str:
    """Writes a grammar for arguments with commas between them, each with whether it is required.
    The required ones come first, then any of the others in their order.
    """
    between = grammar.literal(comma)
    required = [text for text, is_required in written if is_required]
    optional = [text for text, is_required in written if not is_required]
    if required:
        return f" {between} ".join(required) + "".join(f" ({between} {text})?" for text in optional)
    # There is one line for each argument that may come first.
    firsts = [
        " ".join([text, *(f"({between} {later})?" for later in optional[i + 1 :])])
        for i, text in enumerate(optional)
    ]
    return f"({grammar.any_of(firsts)})?" if firsts else ""


def write_after_reasoning(
    grammar: GrammarText, answer: str, marks: ReasoningMarks | None, prompt_text: str
) -> str:
    """Writes the answer, preceded by reasoning if the prompt begins or allows it."""
    if marks is None or marks.is_closed_at_end_of(prompt_text):
        return answer
    after = grammar.literal(marks.next_message) if marks.next_message else grammar.regex(SPACE)
    reasoning = f"{grammar.text_until(marks.end)} {after}"
    answer = (
        f"({grammar.literal(marks.start)} {reasoning}){'*' if marks.next_message else '?'} {answer}"
    )
    return f"{reasoning} {answer}" if marks.is_open_at_end_of(prompt_text) else answer


def write_structure(grammar: GrammarText, params: StructuredOutputsParams) -> str:
    """Writes the structure that `params` ask for, as part of a larger grammar."""
    if params.json is not None or params.json_object:
        schema = params.json if params.json is not None else {"type": "object"}
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if schema is True:
            schema = {}
        if isinstance(schema, dict):
            if params.disable_additional_properties:
                schema = closed_schema(schema)
            own = schema.get("x-guidance")
            options = params.json_options(own if isinstance(own, dict) else {})
            schema = {**schema, "x-guidance": options}
        return f"%json {json.dumps(schema)}"
    if params.regex is not None:
        return grammar.regex(params.regex)
    if params.choice is not None:
        return grammar.any_of(map(grammar.text, params.choice))
    return f"%lark {{\n{params.grammar}\n}}"
