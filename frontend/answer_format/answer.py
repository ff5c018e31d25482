"""The parts of an answer as they stream, and the complete answer.

Must not know: how a model writes them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Reasoning text, without the marks around it."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """Begins tool call number `index` of this answer.

    Its arguments follow before the next call starts. `id` is the model's own, if it writes any.
    """

    index: int
    name: str
    id: str = ""


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON text of a call's arguments.

    Concatenated, the pieces are a JSON object, unless the model stopped within it.
    """

    index: int
    text: str


Part = Content | Reasoning | ToolCallStart | ToolCallArguments


class ParsedToolCall(msgspec.Struct):
    name: str
    arguments: str  # JSON text, as in OpenAI's API
    id: str = ""  # the model's own


class ParsedAnswer(msgspec.Struct):
    """All parts together: they are the content of an answer that is not streamed."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ParsedToolCall] = []


def collect(parts: Iterable[Part]) -> ParsedAnswer:
    answer = ParsedAnswer()
    contents: list[str] = []
    reasonings: list[str] = []
    arguments: list[list[str]] = []
    for part in parts:
        if isinstance(part, Content):
            contents.append(part.text)
        elif isinstance(part, Reasoning):
            reasonings.append(part.text)
        elif isinstance(part, ToolCallStart):
            answer.tool_calls.append(ParsedToolCall(part.name, "", part.id))
            arguments.append([])
        else:
            arguments[part.index].append(part.text)
    answer.content, answer.reasoning = "".join(contents), "".join(reasonings)
    for call, pieces in zip(answer.tool_calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return answer
