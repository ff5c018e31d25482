"""Tool calls as nested elements, as MiniMax M3 writes them.

Must not know: which models use them (formats.py).

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="NAME">
    ]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>
    ]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

There is a line break after the first tag and after each call. A text stands as it is. An object has
an element for each of its keys, and an array elements with the name `item`; the tool's schema says
which of them an element is.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from .argument_types import (
    allowed_types,
    can_stand_alone,
    item_schema,
    member_schema,
    plain_arguments,
    to_json,
)
from .forced import Functions, write_json_call, write_repeated
from .grammar_text import GrammarText
from .json_calls import read_call_object
from .json_text import MAX_DEPTH, json_of
from .tagged_calls import KEY_CHARACTER, NAME_CHARACTER
from .text_stream import Malformed, TextReader, TextStream
from .tool_calls import MAX_NAME_LENGTH, Calls, ToolFormat

NAMESPACE = "]<]minimax[>["  # a token before each tag
ITEM = "item"
ARRAY_KEYWORDS = frozenset({"type", "items", "title", "description", "$defs", "definitions"})


@dataclass(frozen=True)
class NestedCalls(ToolFormat):
    """An argument whose type is string ends with its own end tag. JSON in the place of an object,
    an array, or a call is accepted as well.
    """

    starts: tuple[str, ...] = (f"{NAMESPACE}<tool_call>", f'{NAMESPACE}<invoke name="')
    section_end: str = f"{NAMESPACE}</tool_call>"
    name_end: str = '">'
    call_end: str = f"{NAMESPACE}</invoke>"

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        calls = []
        for name, schema in functions:
            arguments = self._write_members(grammar, schema)
            if arguments is None:
                calls.append(write_json_call(grammar, name, schema, "arguments", "}\n"))
                continue
            head, end = (
                grammar.literal(text)
                for text in (self.starts[1] + name + self.name_end, self.call_end + "\n")
            )
            calls.append(f"{head} {arguments} {end}")
        return write_repeated(grammar, calls, parallel, ("\n", "", self.section_end))

    def _write_members(self, grammar: GrammarText, schema: dict[str, Any]) -> str | None:
        """Returns None where elements cannot follow the schema."""
        properties = plain_arguments(schema)
        if properties is None or not all(
            can_stand_alone(value, allowed_types(value, schema)) for value, _ in properties.values()
        ):
            return None
        return " ".join(
            f"({self._write_element(grammar, key, value)}){'' if is_required else '?'}"
            for key, (value, is_required) in properties.items()
        )

    def _write_element(self, grammar: GrammarText, key: str, schema: dict[str, Any]) -> str:
        start, end = (grammar.literal(f"{NAMESPACE}<{slash}{key}>") for slash in ("", "/"))
        types = allowed_types(schema, schema)
        if types == {"string"}:
            if "enum" not in schema:
                return f"{start} {grammar.text_until(f'{NAMESPACE}</{key}>')}"
            return f"{start} {grammar.any_of(map(grammar.text, schema['enum']))} {end}"
        return f"{start} {self._write_nested(grammar, schema, types)} {end}"

    def _write_nested(
        self, grammar: GrammarText, schema: dict[str, Any], types: frozenset[str]
    ) -> str:
        if types == {"object"} and schema.get("properties"):
            members = self._write_members(grammar, schema)
            return grammar.json(schema) if members is None else members
        if types == {"array"} and schema.keys() <= ARRAY_KEYWORDS and schema.get("items"):
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            items = schema["items"]
            if isinstance(items, dict):
                items = {**definitions, **items}
                if can_stand_alone(items, allowed_types(items, items)):
                    return f"({grammar.rule(self._write_element(grammar, ITEM, items))})*"
        return grammar.json(schema)

    def read(self, stream: TextStream, calls: Calls, mark: str) -> TextReader:
        name_start = self.starts[1]
        is_inside = mark == name_start
        while True:
            yield from stream.skip_space()
            if not is_inside and (yield from stream.peek()) == "{":
                yield from read_call_object(stream, calls)
            else:
                if not is_inside:
                    yield from stream.expect(name_start)
                yield from self._read_call(stream, calls)
            calls.end_call()
            yield from stream.skip_space()
            is_inside = yield from stream.accept(name_start)
            if not is_inside and (yield from stream.peek()) != "{":
                break
        yield from stream.accept(self.section_end)
        stream.drop()

    def _read_call(self, stream: TextStream, calls: Calls) -> TextReader:
        name = yield from stream.read_while(NAME_CHARACTER, MAX_NAME_LENGTH)
        if not name:
            raise Malformed
        yield from stream.expect(self.name_end)
        root = calls.schemas.get(name) or {}
        has_started = False
        while True:
            yield from stream.skip_space()
            has_ended = yield from stream.accept(self.call_end)
            if not has_ended:
                yield from stream.expect(NAMESPACE)
            if not has_started:
                calls.start_object(name)
                has_started = True
            if has_ended:
                calls.end_object()
                return
            key = yield from _read_key(stream)
            calls.key(key)
            if calls.types_of(name, key) == {"string"}:
                calls.emit_arguments('"')
                stream.open_sink(calls.string_part)
                if (yield from stream.read_until((_end_of(key),), keeps_space=True)) is None:
                    raise Malformed
                calls.emit_arguments('"')
            else:
                schema = member_schema(root, key, root)
                calls.emit_arguments((yield from _read_value(stream, key, schema, root, 0)))


def _end_of(key: str) -> str:
    return f"{NAMESPACE}</{key}>"


def _read_key(stream: TextStream) -> Generator[None, None, str]:
    """Consumes the tag whose namespace is consumed."""
    yield from stream.skip_space()
    yield from stream.expect("<")
    key = yield from stream.read_while(KEY_CHARACTER, MAX_NAME_LENGTH)
    if not key.strip() or key.startswith("/"):
        raise Malformed
    yield from stream.expect(">")
    return key


def _read_value(
    stream: TextStream, key: str, schema: Any, root: dict[str, Any], depth: int
) -> Generator[None, None, str]:
    """Consumes the inside of an element and its end tag. Returns its JSON."""
    types = allowed_types(schema, root)
    if depth > MAX_DEPTH:
        raise Malformed
    text, members = "", list[tuple[str, str]]()
    while True:
        start = stream.position
        if (yield from stream.read_until((NAMESPACE,), keeps_space=True)) is None:
            raise Malformed
        text += stream.buffer[start : stream.position - len(NAMESPACE)]
        stream.put_back(len(NAMESPACE))
        if (yield from stream.accept(_end_of(key))):
            break
        stream.skip(len(NAMESPACE))
        if types == {"string"}:
            text += NAMESPACE  # a text may mention it
            continue
        name = yield from _read_key(stream)
        is_item = name == ITEM and "object" not in types
        own = item_schema(schema, root) if is_item else member_schema(schema, name, root)
        members.append((name, (yield from _read_value(stream, name, own, root, depth + 1))))
    if not members:
        return _leaf(text, types)
    if text.strip():
        raise Malformed
    return _joined(members, types)


def _leaf(text: str, types: frozenset[str]) -> str:
    if not text.strip() and "string" not in types:
        for name, empty in (("array", "[]"), ("object", "{}")):
            if name in types:
                return empty
    return to_json(text, types)


def _joined(members: list[tuple[str, str]], types: frozenset[str]) -> str:
    """Returns the JSON of an array or an object. An array may have any names; an object's name that
    occurs several times has an array of values.
    """
    is_list = all(name == ITEM for name, _ in members) and "object" not in types
    if is_list or ("array" in types and "object" not in types):
        return _listed([value for _, value in members])
    by_name: dict[str, list[str]] = {}
    for name, value in members:
        by_name.setdefault(name, []).append(value)
    pairs = (
        f"{json_of(name)}: {values[0] if len(values) == 1 else _listed(values)}"
        for name, values in by_name.items()
    )
    return f"{{{', '.join(pairs)}}}"


def _listed(values: list[str]) -> str:
    return f"[{', '.join(values)}]"
