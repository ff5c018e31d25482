"""Reads JSON from a TextStream character by character, so that arguments can stream while the model
writes them, and repairs what can only have been meant in one way.

Must not know: what the JSON means.

It makes these repairs: it escapes control characters in strings, and backslashes before characters
that JSON does not escape. An escaped apostrophe becomes a plain one, and half of a surrogate pair
becomes U+FFFD. Python's True, False and None get their names in JSON, and a comma before a closing
bracket is dropped. Everything else that is not JSON, such as NaN, is Malformed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator
from typing import Any

from .text_stream import Malformed, TextReader, TextStream

MAX_DEPTH = 200
MAX_SCALAR_LENGTH = 1000
STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
ESCAPED = '"\\/bfnrt'
STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')
HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
JSON_SPACE = " \n\t\r"
SCALAR_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]*")
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")


def read_json(stream: TextStream) -> TextReader:
    """Consumes one value.

    Raises Malformed at the first character that is not JSON and cannot be repaired, or if the text
    ends within the value.
    """
    closers: list[str] = []
    while True:
        yield from _skip_json_space(stream)
        character = yield from stream.peek()
        if character in ("{", "["):
            closer = "}" if character == "{" else "]"
            stream.skip(1)
            yield from _skip_json_space(stream)
            if not (yield from stream.accept(closer)):
                closers.append(closer)
                if len(closers) > MAX_DEPTH:
                    raise Malformed
                if closer == "}":
                    yield from _read_key(stream)
                continue
        elif character == '"':
            yield from read_string(stream)
        else:
            yield from _read_scalar(stream)
        if not (yield from _read_end_of_value(stream, closers)):
            return


def _read_end_of_value(stream: TextStream, closers: list[str]) -> Generator[None, None, bool]:
    """Consumes closing brackets, and the comma and key before the next value.

    Returns False when the outermost value is complete.
    """
    while closers:
        yield from _skip_json_space(stream)
        if (yield from stream.peek()) == ",":
            if (yield from stream.peek_past(1, JSON_SPACE)) == closers[-1]:
                stream.replace(1, "")
                continue
            stream.skip(1)
            if closers[-1] == "}":
                yield from _read_key(stream)
            return True
        yield from stream.expect(closers.pop())
    return False


def _read_key(stream: TextStream) -> TextReader:
    yield from _skip_json_space(stream)
    yield from read_string(stream)
    yield from _skip_json_space(stream)
    yield from stream.expect(":")


def read_string(stream: TextStream) -> TextReader:
    """Consumes a string with its quotes."""
    yield from stream.expect('"')
    while True:
        if not (yield from stream.peek()):
            raise Malformed
        if run := STRING_RUN.match(stream.buffer, stream.position):
            stream.go_to(run.end())
        character = yield from stream.peek()
        if character == '"':
            stream.skip(1)
            return
        if character == "\\":
            yield from _read_escape(stream)
        elif character and character < " ":
            stream.replace(1, json.dumps(character)[1:-1])


def _read_escape(stream: TextStream) -> TextReader:
    """Passes an escape on as a whole, never the backslash alone."""
    escaped = yield from _ahead(stream, 1)
    code = (yield from _code_ahead(stream, 0)) if escaped == "u" else None
    if escaped in ESCAPED:
        stream.skip(2)
    elif escaped == "'":
        stream.replace(2, "'")
    elif code is None:
        stream.replace(1, "\\\\")
    elif not 0xD800 <= code < 0xE000:
        stream.skip(6)
    else:
        second = (yield from _code_ahead(stream, 6)) if code < 0xDC00 else None
        if second is not None and 0xDC00 <= second < 0xE000:
            stream.skip(12)
        else:
            stream.replace(6, "\\ufffd")


def _code_ahead(stream: TextStream, offset: int) -> Generator[None, None, int | None]:
    """Returns the number in the escape \\uXXXX at `offset`, and None for any other text."""
    for i, expected in enumerate("\\u"):
        if (yield from _ahead(stream, offset + i)) != expected:
            return None
    digits = ""
    for i in range(4):
        digit = yield from _ahead(stream, offset + 2 + i)
        if digit not in HEX_DIGITS:
            return None
        digits += digit
    return int(digits, 16)


def _ahead(stream: TextStream, offset: int) -> Generator[None, None, str]:
    """Returns the character at `offset`, in a string: the text does not end before it."""
    character = yield from stream.peek_past(offset, "")
    if not character:
        raise Malformed
    return character


def _read_scalar(stream: TextStream) -> TextReader:
    """Consumes a complete number, true, false or null."""
    while True:
        run = SCALAR_CHARACTERS.match(stream.buffer, stream.position)
        end = run.end() if run else stream.position
        if end - stream.position > MAX_SCALAR_LENGTH:
            raise Malformed
        if end < len(stream.buffer) or stream.has_ended or not (yield from stream.more()):
            break
    text = stream.buffer[stream.position : end]
    if text in PYTHON_NAMES:
        stream.replace(len(text), PYTHON_NAMES[text])
        return
    number = SCALAR.fullmatch(text)
    if not number or ((number[2] or number[3]) and math.isinf(float(text))):
        raise Malformed
    stream.go_to(end)


def read_held_json(stream: TextStream) -> Generator[None, None, str]:
    """Consumes one value without passing it on; returns its text, repaired."""
    assert stream.sink is None
    start = stream.position
    yield from read_json(stream)
    return stream.consumed_since(start)


def read_held_string(stream: TextStream) -> Generator[None, None, str]:
    """Returns the text that a JSON string denotes."""
    start = stream.position
    yield from read_string(stream)
    return json.loads(stream.consumed_since(start))


def repaired_object(text: str) -> str:
    """Returns the text of a JSON object, repaired. Raises Malformed for any other text."""

    def read() -> Generator[None, None, str]:
        if (yield from stream.peek()) != "{":
            raise Malformed
        found = yield from read_held_json(stream)
        if (yield from stream.peek()):
            raise Malformed
        return found

    stream = TextStream()
    stream.append(text.strip())
    stream.end()
    try:
        next(read())
    except StopIteration as end:
        return end.value
    raise AssertionError("a reader waited for text after the end")


def json_of(value: Any) -> str:
    """Returns the JSON of a value that may have halves of surrogate pairs, which no text may have.

    Raises ValueError for numbers that JSON does not have, and beyond MAX_DEPTH.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    depth = 0
    for found in STRING_OR_BRACKET.findall(text) if isinstance(value, (dict, list)) else ():
        depth += (found in "[{") - (found in "]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested deeper than {MAX_DEPTH}")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _skip_json_space(stream: TextStream) -> TextReader:
    while (character := (yield from stream.peek())) and character in JSON_SPACE:
        stream.skip(1)
