"""Reads JSON from a TextStream character by character, so that arguments stream while the model
writes them.

Must not know: what the JSON means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from .text_stream import Malformed, Reader, TextStream

MAX_DEPTH = 200
MAX_SCALAR_LENGTH = 1000
STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{4}')
SCALAR_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]*")
SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")


def read_json(stream: TextStream) -> Reader:
    """Consumes one value.

    Raises Malformed at the first character that is not JSON, or if the text ends within the value.
    """
    closers: list[str] = []
    while True:
        yield from _skip_json_space(stream)
        character = yield from stream.peek()
        if character in ("{", "["):
            closer = "}" if character == "{" else "]"
            stream.position += 1
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
        if (yield from stream.accept(",")):
            if closers[-1] == "}":
                yield from _read_key(stream)
            return True
        yield from stream.expect(closers.pop())
    return False


def _read_key(stream: TextStream) -> Reader:
    yield from _skip_json_space(stream)
    yield from read_string(stream)
    yield from _skip_json_space(stream)
    yield from stream.expect(":")


def read_string(stream: TextStream) -> Reader:
    """Consumes a string with its quotes.

    Control characters such as raw line breaks, which JSON forbids and models write, are escaped.
    """
    yield from stream.expect('"')
    while True:
        if not (yield from stream.peek()):
            raise Malformed
        if run := STRING_RUN.match(stream.buffer, stream.position):
            stream.position = run.end()
        character = yield from stream.peek()
        if character == '"':
            stream.position += 1
            return
        if character == "\\":
            yield from _read_escape(stream)
        elif character and character < " ":
            _escape_control_character(stream, character)


def _read_escape(stream: TextStream) -> Reader:
    """Passes an escape on as a whole, never the backslash alone."""
    for length in (2, 6):
        while len(stream.buffer) < stream.position + length:
            if not (yield from stream.more()):
                raise Malformed
        if stream.buffer[stream.position + 1] != "u":
            break
    if not ESCAPE.fullmatch(stream.buffer, stream.position + 1, stream.position + length):
        raise Malformed
    stream.position += length


def _escape_control_character(stream: TextStream, character: str) -> None:
    if stream.sink is None:
        stream.position += 1
        return
    stream.flush()
    stream.position += 1
    stream.emit(stream.sink(json.dumps(character)[1:-1]))


def _read_scalar(stream: TextStream) -> Reader:
    """Consumes a complete number, true, false or null."""
    while True:
        run = SCALAR_CHARACTERS.match(stream.buffer, stream.position)
        end = run.end() if run else stream.position
        if end - stream.position > MAX_SCALAR_LENGTH:
            raise Malformed
        if end < len(stream.buffer) or stream.has_ended or not (yield from stream.more()):
            break
    if not SCALAR.fullmatch(stream.buffer, stream.position, end):
        raise Malformed
    stream.position = end


def read_held_json(stream: TextStream) -> Generator[None, None, str]:
    """Consumes one value without passing it on; returns its text."""
    assert stream.sink is None
    start = stream.position
    yield from read_json(stream)
    return stream.buffer[start : stream.position]


def read_held_string(stream: TextStream) -> Generator[None, None, str]:
    """The text that a JSON string denotes."""
    start = stream.position
    yield from read_string(stream)
    return json.loads(stream.buffer[start : stream.position], strict=False)


def _skip_json_space(stream: TextStream) -> Reader:
    while (yield from stream.peek()) in (" ", "\n", "\t", "\r"):
        stream.position += 1
