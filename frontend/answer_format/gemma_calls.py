"""Tool calls as Gemma 4 writes them: call:NAME{key:<|"|>text<|"|>,other:{n:1.5}}.

Must not know: which models use them (formats.py).
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from .argument_types import allowed_types, can_stand_alone, plain_arguments
from .forced import Functions, write_listed, write_repeated
from .grammar_text import GrammarText
from .json_text import MAX_DEPTH, json_of, read_held_string, read_json
from .text_stream import Malformed, TextReader, TextStream
from .tool_calls import MAX_NAME_LENGTH, Calls, ToolFormat

CALL = "call:"
NAME_CHARACTER = re.compile(r"[^\s{}<>\"']")
KEY_CHARACTER = re.compile(r"[^\n:{}\[\],<>\"]")
ARRAY_KEYWORDS = frozenset({"type", "items", "title", "description", "$defs", "definitions"})


@dataclass(frozen=True)
class GemmaCalls(ToolFormat):
    """Keys are bare and texts stand between two `quote` marks, without escapes. JSON in the place
    of a key or value is accepted as well.
    """

    starts: tuple[str, ...] = ("<|tool_call>",)
    end: str = "<tool_call|>"
    quote: str = '<|"|>'
    answer_ends: tuple[str, ...] = ("<|tool_response>",)  # the model waits for results

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        calls = [
            f"{grammar.literal(CALL + name)} {self._write_arguments(grammar, schema)}"
            for name, schema in functions
        ]
        return write_repeated(grammar, calls, parallel, ("", self.end + self.start, self.end))

    def _write_arguments(self, grammar: GrammarText, schema: dict[str, Any]) -> str:
        return self._write_object(grammar, schema) or grammar.arguments(schema)

    def _write_object(self, grammar: GrammarText, schema: dict[str, Any]) -> str | None:
        """Returns None where only JSON can follow the schema."""
        properties = plain_arguments(schema)
        if properties is None:
            return None
        pairs = [
            (f"{grammar.literal(key + ':')} {self._write_value(grammar, value)}", is_required)
            for key, (value, is_required) in properties.items()
        ]
        arguments = write_listed(grammar, pairs, ",")
        return f"{grammar.literal('{')} {arguments} {grammar.literal('}')}"

    def _write_value(self, grammar: GrammarText, schema: dict[str, Any]) -> str:
        types = allowed_types(schema, schema)
        quote = grammar.literal(self.quote)
        if types == {"string"} and can_stand_alone(schema, types):
            if "enum" not in schema:
                return f"{quote} {grammar.text_until(self.quote)}"
            options = grammar.any_of(map(grammar.text, schema["enum"]))
            return f"{quote} {options} {quote}"
        if types == {"object"} and "properties" in schema:
            return self._write_object(grammar, schema) or grammar.json(schema)
        if types == {"array"} and schema.keys() <= ARRAY_KEYWORDS and "items" in schema:
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            if isinstance(schema["items"], dict):
                item = grammar.rule(self._write_value(grammar, {**definitions, **schema["items"]}))
                items = f"({item} ({grammar.literal(',')} {item})*)?"
                return f"{grammar.literal('[')} {items} {grammar.literal(']')}"
        return grammar.json(schema)

    def read(self, stream: TextStream, calls: Calls, mark: str) -> TextReader:
        yield from stream.skip_space()
        yield from stream.expect(CALL)
        name = yield from stream.read_while(NAME_CHARACTER, MAX_NAME_LENGTH)
        yield from stream.skip_space()
        if not name or (yield from stream.peek()) != "{":
            raise Malformed
        calls.start(name)
        yield from self._read_value(stream, calls, 0)
        yield from stream.skip_space()
        yield from stream.accept(self.end)
        stream.drop()

    def _read_value(self, stream: TextStream, calls: Calls, depth: int) -> TextReader:
        """Passes a value on as JSON."""
        if depth > MAX_DEPTH:
            raise Malformed
        yield from stream.skip_space()
        if (yield from stream.accept(self.quote)):
            calls.emit_arguments('"')
            stream.open_sink(calls.string_part)
            if (yield from stream.read_until((self.quote,), keeps_space=True)) is None:
                raise Malformed
            calls.emit_arguments('"')
        elif (yield from stream.accept("{")):
            yield from self._read_items(stream, calls, depth, "{", "}")
        elif (yield from stream.accept("[")):
            yield from self._read_items(stream, calls, depth, "[", "]")
        else:
            stream.drop()
            stream.open_sink(calls.arguments_part)
            yield from read_json(stream)
            stream.close_sink()

    def _read_items(
        self, stream: TextStream, calls: Calls, depth: int, opening: str, closing: str
    ) -> TextReader:
        before = opening
        while True:
            yield from stream.skip_space()
            if (yield from stream.accept(closing)):
                break
            calls.emit_arguments(before)
            before = ", "
            if opening == "{":
                key = yield from self._read_key(stream)
                calls.emit_arguments(f"{json_of(key)}: ")
            yield from self._read_value(stream, calls, depth + 1)
            yield from stream.skip_space()
            if not (yield from stream.accept(",")):
                yield from stream.expect(closing)
                break
        calls.emit_arguments(opening + closing if before == opening else closing)

    def _read_key(self, stream: TextStream) -> Generator[None, None, str]:
        if (yield from stream.accept(self.quote)):
            start = stream.position
            if (yield from stream.read_until((self.quote,), keeps_space=True)) is None:
                raise Malformed
            key = stream.buffer[start : stream.position - len(self.quote)]
        elif (yield from stream.peek()) == '"':
            key = yield from read_held_string(stream)
        else:
            key = (yield from stream.read_while(KEY_CHARACTER, MAX_NAME_LENGTH)).strip()
        yield from stream.skip_space()
        yield from stream.expect(":")
        return key
