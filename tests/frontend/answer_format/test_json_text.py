"""JSON read character by character, against Python's json."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.frontend.answer_format.answer import Content
from quire.frontend.answer_format.json_text import json_of, read_json, repaired_object
from quire.frontend.answer_format.text_stream import Malformed, TextStream

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
)


def read(pieces: list[str]) -> tuple[str, str]:
    """Return (the streamed text, the text after the value). Raises Malformed."""
    stream = TextStream()
    stream.open_sink(Content)
    reader = read_json(stream)
    next(reader, None)
    for piece in pieces:
        stream.append(piece)
        next(reader, None)
    stream.end()
    next(reader, None)
    stream.close_sink()
    return "".join(part.text for part in stream.parts), stream.buffer


@settings(deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]), st.integers(1, 9))
def test_every_value_is_unchanged(value, ascii_only, indent, size) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    pieces = [(text + " tail")[i : i + size] for i in range(0, len(text) + 5, size)]
    assert read(pieces) == (text, " tail")


@settings(deadline=None)
@given(st.text(alphabet='{}[]",:\\ 01-.eEtrufalsn\n', max_size=12), st.integers(1, 3))
def test_accepts_what_python_accepts_and_repairs_the_rest_or_refuses_it(text, size) -> None:
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip(" \n"))
        end += len(text) - len(text.lstrip(" \n"))
    except ValueError:
        end = None
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    try:
        passed, rest = read(pieces)
    except Malformed:
        # Quire's reader refuses letters directly after a number ("1e", "truef"), which could only
        # be the start of something else.
        assert end is None or text[:end].lstrip(" \n")[0] not in '{["'
    else:
        read_again = json.loads(passed)
        assert end is None or (read_again == value and rest == text[end:])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a"',
        '{"a": }',
        "[,]",
        "[1,,]",
        "{,}",
        "NaN",
        "1e999",
        "nan",
        '"\\',
        '"\\u12',
        '"abc',
        "tru",
        "01",
        "[" * 300,
        "{'a': 1}",
        "1" * 2000,
    ],
)
def test_refusals(text) -> None:
    for pieces in ([text], list(text)):
        with pytest.raises(Malformed):
            read(pieces)


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ('{"a": "x\ny\t\x01"}', '{"a": "x\\ny\\t\\u0001"}'),
        (r'["\d\\d", "\'", "\u12g4"]', r'["\\d\\d", "\'", "\\u12g4"]'.replace(r"\'", "'")),
        (r'"\ud83e\udd16 \ud83e \udd16\ud83e"', r'"\ud83e\udd16 \ufffd \ufffd\ufffd"'),
        ("[True, False, None,\n]", "[true, false, null\n]"),
        ('{"a": {"b": 1, },}', '{"a": {"b": 1 }}'),
    ],
)
def test_repairs(text, repaired) -> None:
    for pieces in ([text], list(text)):
        assert read(pieces) == (repaired, "")
    assert repaired == json.dumps(json.loads(repaired), ensure_ascii="ud83e" in text) or "," in text


def test_an_object_as_text() -> None:
    assert repaired_object(' {"a": "\\d", "b": [1,]}\n') == '{"a": "\\\\d", "b": [1]}'
    for text in ("", "5", "[]", '{"a": 1} x', '{"a": 1'):
        with pytest.raises(Malformed):
            repaired_object(text)


def test_the_json_of_values_that_json_does_not_have() -> None:
    assert json_of(["\ud83e\udd16", "\ud83e", "é"]) == '["🤖", "\ufffd", "é"]'
    deep = json.loads("[" * 201 + "]" * 201)
    for value in (float("nan"), float("inf"), deep):
        with pytest.raises(ValueError):
            json_of(value)
    assert json_of(deep[0]) == "[" * 200 + "]" * 200
    assert json_of(["[" * 300]) == '["' + "[" * 300 + '"]'


def test_text_is_streamed_at_once() -> None:
    stream = TextStream()
    stream.open_sink(Content)
    reader = read_json(stream)
    next(reader)
    shown = []
    for piece in ['{"a', '": "b', "c\\", "u00", 'e9"', ", ", '"n": 1', "2", "}"]:
        stream.append(piece)
        next(reader, None)
        shown.append("".join(part.text for part in stream.take_parts()))
    stream.close_sink()
    assert [*shown, stream.parts[-1].text] == [
        '{"a',
        '": "b',
        "c",
        "",
        '\\u00e9"',
        "",  # a comma waits for what follows it
        ', "n": ',
        "",
        "",
        "12}",
    ]
