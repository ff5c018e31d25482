"""Tool calls as tags with one argument each: Qwen3-Coder's, GLM's, MiniMax's.

Must not know: which models use them (formats.py). Arguments get their types from the tool's schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .argument_types import allowed_types, can_stand_alone, plain_arguments, to_json
from .forced import Functions, write_json_call, write_repeated
from .grammar_text import GrammarText
from .json_calls import read_call_object
from .text_stream import Malformed, Reader, TextStream
from .tool_calls import MAX_NAME_LENGTH, Calls, ToolFormat

NAME_CHARACTER = re.compile(r"[^\s<>{}\"']")
KEY_CHARACTER = re.compile(r"[^\n<>\"]")


@dataclass(frozen=True)
class TaggedCalls(ToolFormat):
    """start (name_start NAME name_end (key_start KEY key_end value_start VALUE value_end)*
    call_end)* section_end

    `starts`: start, and name_start if there is one. Some models omit the outer tag.

    A string is passed on as it arrives, any other argument when it is complete. A JSON object with
    name and arguments is accepted as well.
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
    # a line break after value_start and before value_end is not part of the value
    values_have_lines: bool = False

    def write(self, grammar: GrammarText, functions: Functions, several: bool) -> str:
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
            several,
            ("", f"\n{self.start}", ""),
        )

    def _write_call(self, grammar: GrammarText, name: str, schema: dict[str, Any]) -> str | None:
        """None where tags cannot follow the schema, such as text with a pattern, or an argument
        that may be text or a number.
        """
        properties = plain_arguments(schema)
        if properties is None or not all(
            can_stand_alone(value, allowed_types(value, schema)) for value, _ in properties.values()
        ):
            return None
        line = "\n" if self.values_have_lines else ""
        pieces = [grammar.literal(self.name_start + name + self.name_end + self.padding)]
        for key, (value_schema, is_required) in properties.items():
            tags = f"{self.key_end}{self.between_key_and_value}{self.value_start}"
            before = grammar.literal(f"{self.key_start}{key}{tags}{line}")
            after = line + self.value_end + self.padding
            if allowed_types(value_schema, schema) != {"string"}:
                value = f"{grammar.json(value_schema)} {grammar.literal(after)}"
            elif "enum" in value_schema:
                options = grammar.any_of(map(grammar.literal, value_schema["enum"]))
                value = f"{options} {grammar.literal(after)}"
            else:
                value = grammar.text_until(after)
            pieces.append(f"({before} {value}){'' if is_required else '?'}")
        ending = self.call_end + self.padding if self.section_end else ""
        return " ".join([*pieces, grammar.literal(ending)])

    @property
    def name_start(self) -> str:
        return self.starts[1] if len(self.starts) > 1 else ""

    def read(self, stream: TextStream, calls: Calls, mark: str) -> Reader:
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
            yield from stream.skip_space()
            is_inside = bool(self.name_start) and (yield from stream.accept(self.name_start))
            if not is_inside:
                break
        yield from stream.accept(self.section_end)
        stream.drop()

    def _read_call(self, stream: TextStream, calls: Calls) -> Reader:
        yield from stream.skip_space()
        name = yield from stream.read_while(NAME_CHARACTER, MAX_NAME_LENGTH)
        if not name:
            raise Malformed
        yield from stream.expect(self.name_end)
        has_started = False
        while True:
            yield from stream.skip_space()
            has_key = yield from stream.accept(self.key_start)
            if not has_key:
                yield from stream.expect(self.call_end)
            if not has_started:
                calls.start_object(name)
                has_started = True
            if not has_key:
                calls.end_object()
                return
            yield from self._read_argument(stream, calls, name)

    def _read_argument(self, stream: TextStream, calls: Calls, name: str) -> Reader:
        key = (yield from stream.read_while(KEY_CHARACTER, MAX_NAME_LENGTH)).strip()
        yield from stream.expect(self.key_end)
        if self.value_start:
            yield from stream.skip_space()
            yield from stream.expect(self.value_start)
        if self.values_have_lines:
            yield from stream.accept("\n")
        calls.key(key)
        types = calls.types_of(name, key)
        ends = (
            (f"\n{self.value_end}", self.value_end) if self.values_have_lines else (self.value_end,)
        )
        if types == {"string"}:
            calls.emit_arguments('"')
            stream.sink = calls.string_part
            if (yield from stream.read_until(ends, keeps_space=True)) is None:
                raise Malformed
            calls.emit_arguments('"')
        else:
            mark = yield from stream.read_until(ends, keeps_space=True)
            if mark is None:
                raise Malformed
            calls.emit_arguments(to_json(stream.buffer[: stream.position - len(mark)], types))
