"""Tool calls as JSON objects: {"name": "f", "arguments": {…}} or {"f": {…}}, single, several, or as
a list.

Must not know: which models use them (formats.py).
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass

from .forced import Functions, write_json_calls
from .grammar_text import GrammarText
from .json_text import read_held_json, read_held_string, read_json, repaired_object
from .text_stream import Malformed, TextReader, TextStream
from .tool_calls import Calls, ListedCalls


@dataclass(frozen=True)
class JsonCalls(ListedCalls):
    name_key: str = "name"
    argument_key: str = "arguments"
    is_list: bool = False  # calls are written as one list
    padding: str = ""  # whitespace between marks and objects

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        pad, opening, closing = self.padding, "", "}"
        if self.is_list:
            frame = (f"{pad}[", ", ", f"]{pad}{self.end}")
        elif self.bare_beginnings:
            frame = ("", f"{self.bare_separator} ", "")
        else:
            opening, closing, frame = pad, f"}}{pad}{self.end}", ("", pad + self.start, "")

        def before(name: str) -> str:
            pair = f'"{self.name_key}": {json.dumps(name)}'
            return f'{opening}{{{pair}, "{self.argument_key}": '

        return write_json_calls(grammar, functions, parallel, before, closing, frame)

    def begins_call(self, character: str) -> bool:
        return character == "{"

    def read_call(self, stream: TextStream, calls: Calls, *, only_known: bool) -> TextReader:
        return read_call_object(stream, calls, only_known=only_known, end=self.end)


@dataclass(frozen=True)
class KeyedCalls(ListedCalls):
    """A list of objects whose only key is the function: [{"f": {…}}, {"g": {…}}]."""

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        frame = ("[", ", ", f"]{self.end}")
        return write_json_calls(
            grammar, functions, parallel, lambda name: f"{{{json.dumps(name)}: ", "}", frame
        )

    def begins_call(self, character: str) -> bool:
        return character == "{"

    def read_call(self, stream: TextStream, calls: Calls, *, only_known: bool) -> TextReader:
        yield from stream.expect("{")
        yield from stream.skip_space()
        name = yield from read_held_string(stream)
        if not name or (only_known and name not in calls.schemas):
            raise Malformed
        yield from stream.skip_space()
        yield from stream.expect(":")
        yield from stream.skip_space()
        yield from read_arguments(stream, calls, name)
        yield from stream.skip_space()
        yield from stream.expect("}")
        stream.drop()


NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


def read_call_object(
    stream: TextStream, calls: Calls, *, only_known: bool = False, end: str = ""
) -> TextReader:
    """With `only_known`, an object that does not name a tool of this request is a JSON answer, not
    a call. The bracket that closes the object may be missing before `end`, a mark, or at the end.
    """
    yield from stream.expect("{")
    name, arguments, has_started = None, None, False
    while True:
        yield from stream.skip_space()
        key = yield from read_held_string(stream)
        yield from stream.skip_space()
        yield from stream.expect(":")
        yield from stream.skip_space()
        if key in NAME_KEYS and name is None:
            name = yield from read_held_string(stream)
            if only_known and name not in calls.schemas:
                raise Malformed
        elif key in ARGUMENT_KEYS and name is not None and not has_started:
            yield from read_arguments(stream, calls, name)
            has_started = True
        elif key in ARGUMENT_KEYS and arguments is None:
            arguments = yield from read_held_json(stream)
        else:
            yield from read_json(stream)  # an id or a type
        yield from stream.skip_space()
        if not (yield from stream.accept(",")):
            break
        yield from stream.skip_space()
        if (yield from stream.peek()) == "}":
            break
    has_arguments = has_started or arguments is not None
    if not (yield from stream.accept("}")) and not (
        has_arguments and (yield from _stands_before(stream, end))
    ):
        raise Malformed
    if not name:
        raise Malformed
    if not has_started:
        calls.start(name)
        calls.emit_arguments(_plain_arguments(arguments or "{}"))
    stream.drop()


def _stands_before(stream: TextStream, mark: str) -> Generator[None, None, bool]:
    """Tells whether the mark or the end of the text comes next."""
    if not (yield from stream.peek()):
        return True
    if not mark or not (yield from stream.accept(mark)):
        return False
    stream.put_back(len(mark))
    return True


def read_arguments(stream: TextStream, calls: Calls, name: str, id: str = "") -> TextReader:
    """Starts the call with its arguments, which are passed on as they arrive."""
    if (yield from stream.peek()) != "{":
        arguments = _plain_arguments((yield from read_held_json(stream)))
        calls.start(name, id)
        calls.emit_arguments(arguments)
        return
    calls.start(name, id)
    stream.open_sink(calls.arguments_part)
    yield from read_json(stream)
    stream.close_sink()


def _plain_arguments(text: str) -> str:
    """Returns the object that a value means: some models write null for no arguments, or the
    arguments' JSON as a string. Raises Malformed for other values.
    """
    value = json.loads(text)
    if isinstance(value, str):
        return repaired_object(value or "{}")
    if not isinstance(value, dict | None):
        raise Malformed
    return "{}" if value is None else text
