"""Tool calls with the name before the JSON of the arguments: DeepSeek's, Kimi's, Mistral's.

Must not know: which models use them (formats.py).
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from .forced import Functions, write_json_calls, write_repeated
from .grammar_text import GrammarText
from .json_calls import JsonCalls, read_arguments
from .text_stream import Malformed, TextReader, TextStream
from .tool_calls import MAX_NAME_LENGTH, Calls, ToolFormat

NAME_CHARACTER = re.compile(r"[^\s<>{}\[\]\"'`|｜]")
KIMI_ID = re.compile(r"(functions\.)?(.+?)(:\d+)?")
FENCE = "```"


@dataclass(frozen=True)
class NamedCalls(ToolFormat):
    """start (call_start NAME separator {…} call_end)* section_end

    `starts` are start and call_start. Whitespace may stand around all of them.

    DeepSeek V3 and R1 write the call's type before the separator, the name after it, and the
    arguments in a ```json fence. V3.1 and Kimi write calls as above; Kimi's name is within the
    call's id, functions.NAME:INDEX. The characters determine which form it is.
    """

    starts: tuple[str, str]
    separator: str
    call_end: str
    section_end: str
    # The text between call_start and call_end has a NAME, ARGUMENTS and perhaps an INDEX, which is
    # the model's own count.
    call_form: str
    between: str = ""

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        before, after = self.call_form.split("ARGUMENTS")
        before, has_index, after_index = before.partition("INDEX")
        index = grammar.regex("[0-9]{1,4}") if has_index else ""
        calls = []
        for name, schema in functions:
            opening = grammar.literal(self.call_start + before.replace("NAME", name))
            opening += f" {index} {grammar.literal(after_index)}" if has_index else ""
            closing = grammar.literal(after + self.call_end)
            calls.append(f"{opening} {grammar.arguments(schema)} {closing}")
        return write_repeated(grammar, calls, parallel, ("", self.between, self.section_end))

    @property
    def call_start(self) -> str:
        return self.starts[1]

    def read(self, stream: TextStream, calls: Calls, mark: str) -> TextReader:
        if mark == self.start:
            yield from stream.skip_space()
            yield from stream.expect(self.call_start)
        while True:
            yield from self._read_call(stream, calls)
            yield from stream.skip_space()
            yield from stream.accept(self.call_end)
            calls.end_call()
            yield from stream.skip_space()
            if not (yield from stream.accept(self.call_start)):
                break
        yield from stream.accept(self.section_end)
        stream.drop()

    def _read_call(self, stream: TextStream, calls: Calls) -> TextReader:
        yield from stream.skip_space()
        name = yield from _read_name(stream)
        yield from stream.skip_space()
        yield from stream.expect(self.separator)
        yield from stream.skip_space()
        is_fenced = (yield from stream.peek()) != "{"
        if is_fenced:
            name = yield from _read_name(stream)
            yield from stream.skip_space()
            yield from stream.expect(f"{FENCE}json")
            yield from stream.skip_space()
        name, id = _name_and_id(name)
        yield from read_arguments(stream, calls, name, id)
        if is_fenced:
            yield from stream.skip_space()
            yield from stream.accept(FENCE)


@dataclass(frozen=True)
class MistralCalls(ToolFormat):
    """[TOOL_CALLS] [{"name": …, "arguments": …}, …], or since 2025 [TOOL_CALLS]NAME[ARGS]{…}
    per call.
    """

    starts: tuple[str, ...] = ("[TOOL_CALLS]",)
    name_is_before: bool = False

    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        if self.name_is_before:
            return write_json_calls(
                grammar, functions, parallel, "{}[ARGS]".format, "", ("", self.start, "")
            )
        return JsonCalls(self.starts, is_list=True).write(grammar, functions, parallel)

    def read(self, stream: TextStream, calls: Calls, mark: str) -> TextReader:
        yield from stream.skip_space()
        if (yield from stream.peek()) in ("[", "{"):
            yield from JsonCalls(self.starts).read(stream, calls, mark)
            return
        name = yield from _read_name(stream)
        if (yield from stream.accept("[CALL_ID]")):
            yield from _read_name(stream)
        yield from stream.accept("[ARGS]")
        yield from stream.skip_space()
        yield from read_arguments(stream, calls, name)


def _name_and_id(written: str) -> tuple[str, str]:
    """Returns the function, and Kimi's id of its call, functions.NAME:INDEX, or ""."""
    found = KIMI_ID.fullmatch(written)
    if not found:
        return written, ""
    return found[2], written if found[1] and found[3] else ""


def _read_name(stream: TextStream) -> Generator[None, None, str]:
    name = yield from stream.read_while(NAME_CHARACTER, MAX_NAME_LENGTH)
    if not name:
        raise Malformed
    return name
