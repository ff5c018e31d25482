"""Parsing of whole and split answers, for the tests of the formats."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from quire.frontend.answer_format import AnswerFormat, ParsedAnswer, Part, collect


def function(name: str, **properties: Any) -> dict[str, Any]:
    """Return a tool as in the chat API; `properties`: parameter -> type or schema."""
    schemas = {
        key: {"type": value} if isinstance(value, str) else value
        for key, value in properties.items()
    }
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": schemas}},
    }


TOOLS = [function("get_weather", city="string", days="integer"), function("f"), function("g")]


def parse_pieces(
    answer_format: AnswerFormat, pieces: list[str], tools: list[dict] | None = None, **options: Any
) -> list[Part]:
    parser = answer_format.parser(TOOLS if tools is None else tools, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return parts + parser.finish()


def parse(
    answer_format: AnswerFormat, text: str, tools: list[dict] | None = None, **options: Any
) -> ParsedAnswer:
    """Parse the whole answer. Fail if another split of the text gives another result, or if the
    arguments of a call are not a JSON object.
    """
    whole = collect(parse_pieces(answer_format, [text], tools, **options))
    for pieces in (
        list(text),
        random_pieces(text, 1),
        random_pieces(text, 2),
        random_pieces(text, 3),
    ):
        assert collect(parse_pieces(answer_format, pieces, tools, **options)) == whole, pieces
    for call in whole.tool_calls:
        assert_object(call.arguments)
    return whole


def assert_object(arguments: str) -> None:
    """Fail unless the text is a JSON object in UTF-8, as a strict parser reads it."""
    assert isinstance(msgspec.json.decode(arguments.encode()), dict), arguments


def random_pieces(text: str, seed: int) -> list[str]:
    draw, pieces = random.Random(seed), []
    while text:
        size = draw.randint(1, 7)
        pieces.append(text[:size])
        text = text[size:]
    return pieces
