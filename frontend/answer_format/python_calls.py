"""Tool calls in Python syntax: [f(a=1, b="x"), g()], as Llama's, LFM2's and OLMo's models write
them.

Must not know: which models use them (formats.py).
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from .argument_types import plain_arguments, read_literal
from .forced import Functions, write_json_call, write_listed, write_repeated
from .grammar_text import GrammarText
from .json_calls import read_call_object
from .json_text import json_of
from .text_stream import Malformed, TextReader, TextStream
from .tool_calls import MAX_NAME_LENGTH, Calls, ListedCalls

NAME_CHARACTER = re.compile(r"[\w.\-]")
NAME = re.compile(r"[\w.\-]+")
LINE_BREAKS = {"\n": "\\n", "\r": "\\r"}
ESCAPED = "\n\\'\"abfnrtv01234567xNuU"
CLOSERS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class PythonCalls(ListedCalls):
    """Arguments are passed on one by one.

    A list of JSON objects with name and arguments is accepted as well.
    """

    may_have_commas = True
    call_per_line: bool = False  # instead of a list

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        frame = (
            ("\n", "\n", f"\n{self.end}")
            if self.call_per_line
            else ("[", ", ", f"]{self.end if self.start else ''}")
        )
        return write_repeated(
            grammar,
            [self._write_call(grammar, name, schema) for name, schema in functions],
            parallel,
            frame,
        )

    def _write_call(self, grammar: GrammarText, name: str, schema: dict[str, Any]) -> str:
        """Writes a grammar with values as JSON, which `read` accepts as Python. If the arguments
        cannot be written one by one, the grammar is for one JSON object.
        """
        properties = plain_arguments(schema)
        if properties is None or not NAME.fullmatch(name):
            return write_json_call(grammar, name, schema, "parameters")
        written = [
            (f"{grammar.literal(key + '=')} {grammar.json(value)}", is_required)
            for key, (value, is_required) in properties.items()
        ]
        arguments = write_listed(grammar, written, ", ")
        return f"{grammar.literal(f'{name}(')} {arguments} {grammar.literal(')')}"

    def begins_call(self, character: str) -> bool:
        return NAME_CHARACTER.match(character) is not None

    def read_call(self, stream: TextStream, calls: Calls, *, only_known: bool) -> TextReader:
        if (yield from stream.peek()) == "{":
            yield from read_call_object(stream, calls, only_known=only_known, end=self.end)
        else:
            yield from _read_call(stream, calls, only_known)


def _read_call(stream: TextStream, calls: Calls, only_known: bool) -> TextReader:
    name = yield from stream.read_while(NAME_CHARACTER, MAX_NAME_LENGTH)
    if not name or (only_known and name not in calls.schemas):
        raise Malformed
    yield from stream.expect("(")
    has_started = False
    while True:
        yield from stream.skip_space()
        if (yield from stream.accept(")")):
            break
        key = yield from stream.read_while(NAME_CHARACTER, MAX_NAME_LENGTH)
        yield from stream.skip_space()
        yield from stream.expect("=")
        value = yield from _read_value(stream)
        if not has_started:
            calls.start_object(name)
            has_started = True
        calls.key(key)
        calls.emit_arguments(value)
        if not (yield from stream.accept(",")):
            yield from stream.expect(")")
            break
    if not has_started:
        calls.start_object(name)
    calls.end_object()


def _read_value(stream: TextStream) -> Generator[None, None, str]:
    """Consumes a literal up to the comma or bracket after it; returns its JSON."""
    start = stream.position
    closers: list[str] = []
    while (character := (yield from stream.peek())) and (closers or character not in ",)"):
        if character in "'\"":
            yield from _skip_string(stream, character)
            continue
        if character in CLOSERS:
            closers.append(CLOSERS[character])
        elif character in ")]}" and (not closers or character != closers.pop()):
            raise Malformed
        stream.skip(1)
    try:
        if not character:
            raise Malformed
        return json_of(read_literal(stream.consumed_since(start)))
    except (ValueError, RecursionError):
        raise Malformed from None


def _skip_string(stream: TextStream, quote: str) -> TextReader:
    """Escapes line breaks, and backslashes that begin no escape."""
    stream.skip(1)
    while (character := (yield from stream.peek())) != quote:
        if not character:
            raise Malformed
        if character in LINE_BREAKS:
            stream.replace(1, LINE_BREAKS[character])
        elif character != "\\":
            stream.skip(1)
        elif not (escaped := (yield from stream.peek_past(1, ""))):
            raise Malformed
        elif escaped in ESCAPED:
            stream.skip(2)
        else:
            stream.replace(1, "\\\\")
    stream.skip(1)
