"""Calls: hands on the tool calls that a format's reader finds.
May know: TextStream, the parts of an answer, the schemas of the request's tools.
Must not know: how calls are written."""

from __future__ import annotations

from typing import Any, Protocol

from .answer import ToolCallArguments, ToolCallStart
from .text_stream import Reader, TextStream


class Calls:
    """`schemas`: the request's tools by name, each with the JSON schema of its arguments."""

    def __init__(self, stream: TextStream, schemas: dict[str, dict[str, Any]]):
        self.schemas = schemas
        self._stream = stream
        self._index = -1

    def start(self, name: str) -> None:
        self._index += 1
        self._stream.emit(ToolCallStart(self._index, name))

    def emit_arguments(self, text: str) -> None:
        self._stream.emit(self.arguments_part(text))

    def arguments_part(self, text: str) -> ToolCallArguments:
        """Of the call that was started last."""
        return ToolCallArguments(self._index, text)


class ToolFormat(Protocol):
    """How a family of models writes tool calls."""

    starts: tuple[str, ...]  # marks, one of which stands before a call
    bare_beginnings: str  # characters with which an answer, or what follows a call, may be a call without a mark; mostly none
    bare_separator: str  # between two of those

    def read(self, stream: TextStream, calls: Calls, mark: str) -> Reader:
        """Reads what stands behind `mark` (consumed), up to the end of the call or calls. Raises Malformed."""
