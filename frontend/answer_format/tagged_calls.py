"""Tool calls as tags with one argument each: Qwen3-Coder's, GLM's, MiniMax's, DeepSeek's since
V3.2.

Must not know: which models use them (formats.py). Arguments get their types from the tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from .argument_types import allowed_types, can_stand_alone, plain_arguments, to_json
from .forced import Functions, write_json_call, write_repeated
from .grammar_text import GrammarText
from .json_calls import read_call_object
from .text_stream import Malformed, TextReader, TextStream
from .tool_calls import MAX_NAME_LENGTH, Calls, ToolFormat

NAME_CHARACTER = re.compile(r"[^\s<>{}\"']")
KEY_CHARACTER = re.compile(r"[^\n<>\"]")


@dataclass(frozen=True)
class TaggedCalls(ToolFormat):
    """start (name_start NAME name_end (key_start KEY key_end value_start VALUE value_end)*
    call_end)* section_end

    `starts` are start, and name_start if there is one. Some models omit the outer tag.

    A JSON object with name and arguments is accepted as well. Where values have lines of their own,
    an end tag that is missing is implied by the next tag at the beginning of a line, by the tag of
    another argument of the function, or by the ends of the call and the section.
    """

    starts: tuple[str, ...]
    section_end: str
    name_end: str
    key_start: str
    key_end: str
    value_start: str
    value_end: str
    call_end: str
    padding: str = "\n"  # whitespace that the model writes between the tags
    between_key_and_value: str = ""
    # A line break after value_start and before value_end is not part of the value.
    values_have_lines: bool = False

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        section = self.section_end or self.call_end
        calls = [
            self._write_call(grammar, name, schema)
            or write_json_call(grammar, name, schema, "arguments", "}" + self.padding)
            for name, schema in functions
        ]
        opening = grammar.literal(self.padding if self.name_start else "")
        return write_repeated(
            grammar,
            [f"{opening} {c} {grammar.literal(section)}" for c in calls],
            parallel,
            ("", self.padding + self.start, ""),
        )

    def _write_call(self, grammar: GrammarText, name: str, schema: dict[str, Any]) -> str | None:
        """Returns None where tags cannot follow the schema."""
        arguments = self._write_arguments(grammar, schema)
        if arguments is None:
            return None
        head = grammar.literal(self.name_start + name + self.name_end + self.padding)
        ending = self.call_end + self.padding if self.section_end else ""
        return f"{head} {arguments} {grammar.literal(ending)}"

    def _write_arguments(self, grammar: GrammarText, schema: dict[str, Any]) -> str | None:
        """Returns None where tags cannot follow the schema, such as text with a pattern, or an
        argument that may be text or a number.
        """
        properties = plain_arguments(schema)
        if properties is None or not all(
            can_stand_alone(value, allowed_types(value, schema)) for value, _ in properties.values()
        ):
            return None
        line = "\n" if self.values_have_lines else ""
        pieces = []
        for key, (value_schema, is_required) in properties.items():
            types = allowed_types(value_schema, schema)
            before = grammar.literal(f"{self.key_start}{key}{self._after_key(types)}{line}")
            after = line + self.value_end + self.padding
            if types != {"string"}:
                value = f"{grammar.json(value_schema)} {grammar.literal(after)}"
            elif "enum" in value_schema:
                options = grammar.any_of(map(grammar.text, value_schema["enum"]))
                value = f"{options} {grammar.literal(after)}"
            else:
                value = grammar.text_until(after)
            pieces.append(f"({before} {value}){'' if is_required else '?'}")
        return " ".join(pieces)

    def _after_key(self, types: frozenset[str]) -> str:
        """Returns what stands between a key and its value."""
        return f"{self.key_end}{self.between_key_and_value}{self.value_start}"

    @property
    def name_start(self) -> str:
        return self.starts[1] if len(self.starts) > 1 else ""

    def read(self, stream: TextStream, calls: Calls, mark: str) -> TextReader:
        is_inside = mark == self.name_start
        while True:
            yield from stream.skip_space()
            if not is_inside and (yield from stream.peek()) == "{":
                yield from read_call_object(stream, calls)
                yield from stream.skip_space()
                yield from stream.accept("" if self.section_end else self.call_end)
            else:
                if not is_inside:
                    yield from stream.expect(self.name_start)
                yield from self._read_call(stream, calls)
            calls.end_call()
            yield from stream.skip_space()
            is_inside = bool(self.name_start) and (yield from stream.accept(self.name_start))
            if not is_inside:
                break
        yield from stream.accept(self.section_end)
        stream.drop()

    def _read_call(self, stream: TextStream, calls: Calls) -> TextReader:
        yield from self._read_arguments(stream, calls, (yield from self._read_name(stream)))

    def _read_name(self, stream: TextStream) -> Generator[None, None, str]:
        """Consumes the name and what stands behind it."""
        yield from stream.skip_space()
        name = yield from stream.read_while(NAME_CHARACTER, MAX_NAME_LENGTH)
        if not name:
            raise Malformed
        yield from stream.expect(self.name_end)
        return name

    def _read_arguments(self, stream: TextStream, calls: Calls, name: str) -> TextReader:
        """Reads the arguments and the end of a call."""
        has_started = False
        while True:
            yield from stream.skip_space()
            has_key = yield from stream.accept(self.key_start)
            if not has_key:
                yield from self._read_call_end(stream)
            if not has_started:
                calls.start_object(name)
                has_started = True
            if not has_key:
                calls.end_object()
                return
            yield from self._read_argument(stream, calls, name)

    def _read_call_end(self, stream: TextStream) -> TextReader:
        if (yield from stream.accept(self.call_end)):
            return
        if not self.values_have_lines or not (yield from stream.accept(self.section_end)):
            raise Malformed
        stream.put_back(len(self.section_end))

    def _read_argument(self, stream: TextStream, calls: Calls, name: str) -> TextReader:
        key = self._named((yield from stream.read_while(KEY_CHARACTER, MAX_NAME_LENGTH)).strip())
        types = yield from self._read_after_key(stream, calls.types_of(name, key))
        if self.values_have_lines:
            yield from stream.accept("\n")
        calls.key(key)
        if types == {"string"}:
            calls.emit_arguments('"')
            stream.open_sink(calls.string_part)
            yield from self._read_value(stream, calls, name)
            calls.emit_arguments('"')
        else:
            start = stream.position
            length = yield from self._read_value(stream, calls, name)
            calls.emit_arguments(to_json(stream.buffer[start : start + length], types))

    def _named(self, text: str) -> str:
        """Returns the name or key that is written as `text`."""
        return text

    def _read_after_key(
        self, stream: TextStream, types: frozenset[str]
    ) -> Generator[None, None, frozenset[str]]:
        """Consumes what stands between a key and its value; returns the value's types."""
        yield from stream.expect(self.key_end)
        if self.value_start:
            yield from stream.skip_space()
            yield from stream.expect(self.value_start)
        return types

    def _read_value(
        self, stream: TextStream, calls: Calls, name: str
    ) -> Generator[None, None, int]:
        """Consumes a value and its end tag. Returns the length of a value not passed on."""
        start, sink = stream.position, stream.sink
        while True:
            mark = yield from stream.read_until(self._value_ends(calls), keeps_space=True)
            if mark is None:
                raise Malformed
            if mark != self.key_start or (yield from self._names_argument(stream, calls, name)):
                break
            stream.open_sink(sink)  # the tag is text
        length = stream.position - len(mark) - start
        if self.value_end not in mark:  # the tag that follows is read again
            stream.put_back(len(mark.lstrip("\n")))
        return length

    def _value_ends(self, calls: Calls) -> tuple[str, ...]:
        """Returns the marks that end a value. Forced values may contain any tag but their end."""
        if not self.values_have_lines:
            return (self.value_end,)
        own = (f"\n{self.value_end}", self.value_end)
        if calls.are_valid:
            return own
        both = (f"{self.call_end}{between}{self.section_end}" for between in ("", "\n"))
        lines = (f"\n{tag}" for tag in (self.key_start, self.call_end, self.section_end))
        return (*own, *lines, *both, self.key_start)

    def _names_argument(
        self, stream: TextStream, calls: Calls, name: str
    ) -> Generator[None, None, bool]:
        """Tells whether the tag of one of the function's arguments follows."""
        key = ""
        while len(key) <= MAX_NAME_LENGTH:
            character = yield from stream.peek_past(len(key), "")
            if not character or not KEY_CHARACTER.match(character):
                break
            key += character
        properties = (calls.schemas.get(name) or {}).get("properties")
        return isinstance(properties, dict) and key in properties


@dataclass(frozen=True)
class DsmlCalls(TaggedCalls):
    """Tags that say whether their value is text: <… name="KEY" string="true">."""

    type_start: str = ' string="'
    type_end: str = '">'

    def _after_key(self, types: frozenset[str]) -> str:
        is_text = "true" if types == {"string"} else "false"
        return f"{self.key_end}{self.type_start}{is_text}{self.type_end}"

    def _read_after_key(
        self, stream: TextStream, types: frozenset[str]
    ) -> Generator[None, None, frozenset[str]]:
        yield from stream.expect(self.key_end)
        if not (yield from stream.accept(self.type_start)):
            yield from stream.expect(self.type_end[1:])
            return types
        is_text = yield from stream.accept("true")
        if not is_text:
            yield from stream.expect("false")
        yield from stream.expect(self.type_end)
        return frozenset({"string"}) if is_text else types
