"""Calls: passes on the tool calls that a format's reader finds. ToolFormat: a family of formats.

Must not know: the text of any format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .answer import ToolCallArguments, ToolCallStart
from .argument_types import allowed_types
from .json_text import json_of
from .text_stream import Malformed, TextReader, TextStream

if TYPE_CHECKING:
    from .forced import Functions
    from .grammar_text import GrammarText


MAX_NAME_LENGTH = 256


class Calls:
    """`schemas` are the request's tools by name, each with the JSON schema of its arguments.

    A call is passed on when it is whole, so that text which turns out to be no call becomes
    content. If `are_valid`, because a grammar constrains the calls, it is passed on as it arrives.
    Calls after `begin_draft` are passed on together, by `end`, and only to functions of `schemas`.
    """

    def __init__(
        self, stream: TextStream, schemas: dict[str, dict[str, Any]], *, are_valid: bool = False
    ):
        self.schemas = schemas
        self._stream = stream
        self.are_valid = are_valid
        self._index = self._last_whole = -1
        self._is_draft = False
        self._before_key = "{"
        self._ids: set[str] = set()

    def begin(self) -> None:
        """Notes that the stream stands after a mark: a call may follow."""
        if not self.are_valid:
            self._stream.hold()

    def begin_draft(self) -> None:
        """Notes that the stream stands after a mark in the reasoning, where a call may be no more
        than an idea.
        """
        self._is_draft = True
        self._stream.hold()

    def end_call(self) -> None:
        """Ends a call with the consumed text; another may follow."""
        self._stream.drop()
        if self._is_draft:
            return
        self._last_whole = self._index
        self._stream.release()
        self.begin()

    def end(self) -> None:
        """Notes that no call follows."""
        self._is_draft = False
        self._last_whole = self._index
        self._stream.release()

    def give_up(self) -> int:
        """After Malformed, makes what follows the last whole call content.

        Returns the number of characters that are read again.
        """
        if not self.are_valid:
            self._index = self._last_whole
        self._is_draft = False
        return self._stream.give_up()

    @property
    def is_cut(self) -> bool:
        """Tells whether a call that is passed on has not ended."""
        return self._index > self._last_whole

    def start(self, name: str, id: str = "") -> None:
        """Starts a call. `id` is the model's own; one that it wrote before is dropped.

        Raises Malformed for a draft to an unknown function.
        """
        if self._is_draft and name not in self.schemas:
            raise Malformed
        id = "" if id in self._ids else id
        self._ids.add(id)
        self._index += 1
        self._stream.emit(ToolCallStart(self._index, name, id))

    def emit_arguments(self, text: str) -> None:
        self._stream.emit(self.arguments_part(text))

    def start_object(self, name: str) -> None:
        """Starts a call whose arguments come one by one: `key`, its value, …, `end_object`."""
        self.start(name)
        self._before_key = "{"

    def key(self, key: str) -> None:
        self.emit_arguments(f"{self._before_key}{json_of(key)}: ")
        self._before_key = ", "

    def end_object(self) -> None:
        self.emit_arguments("{}" if self._before_key == "{" else "}")

    def arguments_part(self, text: str) -> ToolCallArguments:
        """Passes on a part of the arguments of the current call."""
        return ToolCallArguments(self._index, text)

    def string_part(self, text: str) -> ToolCallArguments:
        """Passes on a part of the inside of a string among the arguments."""
        return ToolCallArguments(self._index, json_of(text)[1:-1])

    def types_of(self, name: str, key: str) -> frozenset[str]:
        """Returns the types that the schema allows for this argument; an empty set allows any."""
        schema = self.schemas.get(name) or {}
        properties = schema.get("properties")
        return (
            allowed_types(properties.get(key), schema)
            if isinstance(properties, dict)
            else frozenset()
        )


class ToolFormat(ABC):
    """How a family of models writes tool calls."""

    starts: tuple[str, ...]  # marks, one of which precedes a call
    bare_beginnings: str = ""  # characters that may begin a call without a mark
    bare_separator: str = ""  # the text between two calls without marks
    answer_ends: tuple[str, ...] = ()  # tokens after which the model expects another's text

    @property
    def start(self) -> str:
        """Returns the mark before the first call, or "" if there is none."""
        return "" if self.bare_beginnings else self.starts[0]

    @abstractmethod
    def read(self, stream: TextStream, calls: Calls, mark: str) -> TextReader:
        """Reads the call or calls after `mark`, which is consumed ("" for calls without one).

        Raises Malformed.
        """

    @abstractmethod
    def write(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        """Writes a grammar expression for a call to one of `functions`, or for `parallel` ones.

        `read` accepts what it matches. The mark before the first call is not part of it.
        """

    def write_voluntary(self, grammar: GrammarText, functions: Functions, parallel: bool) -> str:
        """Writes a grammar expression for an answer of any text and any calls."""
        calls = self.write(grammar, functions, parallel)
        call = f"{grammar.text_until(self.start)} {calls}"
        return f"({call}){'*' if parallel else '?'} {grammar.text_without(self.start)}"


@dataclass(frozen=True)
class ListedCalls(ToolFormat):
    """One or several calls, or a list of them, and then the mark `end`."""

    starts: tuple[str, ...] = ()
    end: str = ""
    bare_beginnings: str = ""
    bare_separator: str = ""
    may_have_commas = False  # between calls that are not a list

    def read(self, stream: TextStream, calls: Calls, mark: str) -> TextReader:
        yield from stream.skip_space()
        is_list = yield from stream.accept("[")
        while True:
            yield from stream.skip_space()
            yield from self.read_call(stream, calls, only_known=not mark)
            calls.end_call()
            yield from stream.skip_space()
            has_comma = (is_list or self.may_have_commas) and (yield from stream.accept(","))
            if not has_comma and (is_list or not self.begins_call((yield from stream.peek()))):
                break
        if is_list:
            yield from stream.expect("]")
            yield from stream.skip_space()
        if mark and self.end:
            for stray in ("", "}", "}\n"):  # one bracket too many is a common mistake
                if (yield from stream.accept(stray + self.end)):
                    break
        stream.drop()

    @abstractmethod
    def begins_call(self, character: str) -> bool:
        """Tells whether another call follows without a comma."""

    @abstractmethod
    def read_call(self, stream: TextStream, calls: Calls, *, only_known: bool) -> TextReader:
        """Reads one call. `only_known`: a function that is no tool of this request is Malformed."""
