"""Calls: passes on the tool calls that a format's reader finds.

Must not know: how calls are written.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from .answer import ToolCallArguments, ToolCallStart
from .argument_types import allowed_types
from .text_stream import Reader, TextStream

if TYPE_CHECKING:
    from .forced import Functions
    from .grammar_text import GrammarText


MAX_NAME_LENGTH = 256


class Calls:
    """`schemas`: the request's tools by name, each with the JSON schema of its arguments."""

    def __init__(self, stream: TextStream, schemas: dict[str, dict[str, Any]]):
        self.schemas = schemas
        self._stream = stream
        self._index = -1
        self._before_key = "{"

    def start(self, name: str) -> None:
        self._index += 1
        self._stream.emit(ToolCallStart(self._index, name))

    def emit_arguments(self, text: str) -> None:
        self._stream.emit(self.arguments_part(text))

    def start_object(self, name: str) -> None:
        """Starts a call whose arguments come one by one: `key`, its value, …, `end_object`."""
        self.start(name)
        self._before_key = "{"

    def key(self, key: str) -> None:
        self.emit_arguments(f"{self._before_key}{json.dumps(key, ensure_ascii=False)}: ")
        self._before_key = ", "

    def end_object(self) -> None:
        self.emit_arguments("{}" if self._before_key == "{" else "}")

    def arguments_part(self, text: str) -> ToolCallArguments:
        """A part of the arguments of the current call."""
        return ToolCallArguments(self._index, text)

    def string_part(self, text: str) -> ToolCallArguments:
        """A part of the inside of a string among the arguments."""
        return ToolCallArguments(self._index, json.dumps(text, ensure_ascii=False)[1:-1])

    def types_of(self, name: str, key: str) -> frozenset[str]:
        """The types that the schema allows for this argument; empty: any."""
        schema = self.schemas.get(name) or {}
        properties = schema.get("properties")
        return (
            allowed_types(properties.get(key), schema)
            if isinstance(properties, dict)
            else frozenset()
        )


class ToolFormat(Protocol):
    """How a family of models writes tool calls."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Marks, one of which precedes a call."""
        ...

    @property
    def bare_beginnings(self) -> str:
        """Characters that may begin a call without a mark; usually none."""
        ...

    @property
    def bare_separator(self) -> str:
        """The text between two calls without marks."""
        ...

    def read(self, stream: TextStream, calls: Calls, mark: str) -> Reader:
        """Reads the call or calls after `mark`, which is consumed.

        Raises Malformed.
        """
        ...

    def write(self, grammar: GrammarText, functions: Functions, several: bool) -> str:
        """A grammar expression for a call to one of `functions`, or for `several` calls.

        `read` accepts what it matches. The mark before the first call is not part of it.
        """
        ...

    @property
    def start(self) -> str:
        """The mark before the first call, or "" if there is none."""
        ...
