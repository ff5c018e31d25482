"""Kimi K3's answers: channels, whose tags are written with the tokens <|open|>, <|close|> and
<|sep|>, and tool calls with typed arguments in one of them.

Must not know: which models use them (formats.py).

    <|open|>think<|sep|>TEXT<|close|>think<|sep|>
    <|open|>response<|sep|>TEXT<|close|>response<|sep|>
    <|open|>tools<|sep|>
        <|open|>call tool="NAME" index="1"<|sep|>
            <|open|>argument key="KEY" type="string"<|sep|>TEXT<|close|>argument<|sep|>
        <|close|>call<|sep|>
    <|close|>tools<|sep|>
    <|close|>message<|sep|>

It is written without the line breaks. The prompt ends in the first or the second channel. In place
of its arguments a call may have all of them as one JSON object, between `json` tags.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from .argument_types import TYPE_NAMES
from .forced import Functions, write_repeated
from .grammar_text import GrammarText
from .json_calls import read_arguments
from .reasoning import ReasoningMarks
from .tagged_calls import NAME_CHARACTER, TaggedCalls
from .text_stream import Malformed, TextReader, TextStream
from .tool_calls import MAX_NAME_LENGTH, Calls

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
ATTRIBUTE_CHARACTER = re.compile(r"[^<>]")
_TYPE = re.compile(r'\btype="(\w*)"')
TYPES = frozenset(TYPE_NAMES.values()) - {"integer"}  # that an argument may be said to have


@dataclass(frozen=True)
class ChannelMarks(ReasoningMarks):
    """The marks of the channels for reasoning and content."""

    start: str = f"{OPEN}think{SEP}"
    end: str = f"{CLOSE}think{SEP}"
    content_start: str = f"{OPEN}response{SEP}"
    content_end: str = f"{CLOSE}response{SEP}"
    answer_end: str = f"{CLOSE}message{SEP}"
    texts: tuple[str, ...] = (OPEN, CLOSE, SEP)

    def write_content(self, grammar: GrammarText, content: str) -> str:
        opening, closing = grammar.literal(self.content_start), grammar.literal(self.content_end)
        return f"{opening} {content} {closing}"

    def write_before_calls(self, grammar: GrammarText, prompt_text: str) -> str:
        is_open = self.is_content_open_at_end_of(prompt_text)
        return grammar.literal(("" if is_open else self.content_start) + self.content_end)


@dataclass(frozen=True)
class XtmlCalls(TaggedCalls):
    """Tags that say of which type their value is."""

    starts: tuple[str, ...] = (f"{OPEN}tools{SEP}", f'{OPEN}call tool="')
    section_end: str = f"{CLOSE}tools{SEP}"
    name_end: str = '"'
    key_start: str = f'{OPEN}argument key="'
    key_end: str = '"'
    value_start: str = ""
    value_end: str = f"{CLOSE}argument{SEP}"
    call_end: str = f"{CLOSE}call{SEP}"
    padding: str = ""
    json_start: str = f"{OPEN}json"
    json_end: str = f"{CLOSE}json{SEP}"
    index_start: str = ' index="'
    type_start: str = ' type="'
    type_end: str = f'"{SEP}'
    answer_ends: tuple[str, ...] = ("<|end_of_msg|>",)

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        index = grammar.regex("[1-9][0-9]{0,3}")
        calls = []
        for name, schema in functions:
            before = self.name_start + _escaped(name) + self.name_end + self.index_start
            arguments = self._write_arguments(grammar, schema)
            if arguments is None:
                opening = f"{self.json_start}{self.type_start}object{self.type_end}"
                arguments = (
                    f"{grammar.literal(opening)} {grammar.arguments(schema)} "
                    f"{grammar.literal(self.json_end)}"
                )
            calls.append(
                f"{grammar.literal(before)} {index} {grammar.literal(self.type_end)} {arguments} "
                f"{grammar.literal(self.call_end)}"
            )
        return write_repeated(grammar, calls, parallel, ("", "", self.section_end))

    def write_voluntary(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        """The text may stand in its channel, or be all that comes before the calls."""
        marks = ChannelMarks()
        calls = f"{grammar.literal(self.start)} {self.write(grammar, functions, parallel)}"
        content = (
            f"({grammar.literal(marks.content_start)})? {grammar.text_until(marks.content_end)}"
        )
        plain = super().write_voluntary(grammar, functions, parallel)
        return grammar.any_of(
            [plain, f"{content} ({calls})? ({grammar.literal(marks.answer_end)})?"]
        )

    def _after_key(self, types: frozenset[str]) -> str:
        names = {"number" if name == "integer" else name for name in types}
        stated = min(names - {"null"}, default="null")
        return f"{self.key_end}{self.type_start}{stated}{self.type_end}"

    def _named(self, text: str) -> str:
        return text.replace("&quot;", '"').replace("&amp;", "&")

    def _read_name(self, stream: TextStream) -> Generator[None, None, str]:
        name = self._named((yield from stream.read_while(NAME_CHARACTER, MAX_NAME_LENGTH)))
        if not name:
            raise Malformed
        yield from stream.expect(self.name_end)
        yield from self._read_attributes(stream)
        return name

    def _read_attributes(self, stream: TextStream) -> Generator[None, None, str]:
        """Consumes the rest of a tag, which it returns."""
        text = yield from stream.read_while(ATTRIBUTE_CHARACTER, MAX_NAME_LENGTH)
        yield from stream.expect(SEP)
        return text

    def _read_arguments(self, stream: TextStream, calls: Calls, name: str) -> TextReader:
        yield from stream.skip_space()
        if not (yield from stream.accept(self.json_start)):
            yield from super()._read_arguments(stream, calls, name)
            return
        yield from self._read_attributes(stream)
        yield from stream.skip_space()
        yield from read_arguments(stream, calls, name)
        for end in (self.json_end, self.call_end):
            yield from stream.skip_space()
            yield from stream.expect(end)

    def _read_after_key(
        self, stream: TextStream, types: frozenset[str]
    ) -> Generator[None, None, frozenset[str]]:
        """Without a type that is known, the tool's schema has it. Other types than string mean
        JSON.
        """
        yield from stream.expect(self.key_end)
        stated = _TYPE.search((yield from self._read_attributes(stream)))
        if stated is None or stated[1] not in TYPES:
            return types
        return frozenset({"string"} if stated[1] == "string" else ())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
