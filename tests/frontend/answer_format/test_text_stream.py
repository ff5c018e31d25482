"""TextStream: what a reader gets of text in pieces, what is buffered and what is passed on."""

from __future__ import annotations

import pytest
from quire.frontend.answer_format.answer import Content
from quire.frontend.answer_format.text_stream import Malformed, TextStream


def run(reader, stream: TextStream, *pieces: str) -> object:
    """Return the reader's result."""
    try:
        next(reader)
        for piece in pieces:
            stream.append(piece)
            next(reader)
        stream.end()
        next(reader)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the reader waits for text after the end")


@pytest.mark.parametrize("pieces", [["<call>"], ["<ca", "ll>"], list("<call>x")])
def test_accept_waits_while_the_mark_may_still_arrive(pieces) -> None:
    stream = TextStream()
    assert run(stream.accept("<call>"), stream, *pieces) is True
    assert stream.position == 6


@pytest.mark.parametrize("pieces", [["<cat"], ["<ca", "t"], ["<ca"], []])
def test_accept_consumes_nothing_else(pieces) -> None:
    stream = TextStream()
    assert run(stream.accept("<call>"), stream, *pieces) is False
    assert stream.position == 0
    with pytest.raises(Malformed):
        run(stream.expect("!"), stream)


def test_text_is_buffered_only_while_it_may_begin_a_mark() -> None:
    stream = TextStream()
    stream.open_sink(Content)
    reader = stream.read_until(("<call>",))
    next(reader)
    shown = []
    for piece in ["a", "b <", "c", " \n", " <cal", "k", "  ", "d  <call", ">e"]:
        stream.append(piece)
        next(reader, None)
        shown.append("".join(part.text for part in stream.take_parts()))
    assert shown == ["a", "b", "", " <c", "", " \n <calk", "", "  d", ""]
    assert (stream.sink, stream.buffer[stream.position :]) == (None, "e")
    stream.give_up()  # the text after the mark is not a call
    assert (stream.buffer[: stream.position], stream.buffer[stream.position :]) == ("  <call>", "e")


def test_the_first_mark_counts() -> None:
    stream = TextStream()
    assert run(stream.read_until(("<b>", "<a>")), stream, "x<a>y<b>") == "<a>"
    assert run(stream.read_until(("<b>", "<a>")), stream) == "<b>"
    assert run(stream.read_until(("<b>", "<a>")), stream) is None


def test_long_white_space_before_a_mark_is_not_buffered() -> None:
    for pieces in ([" " * 100 + "<m>"], list(" " * 100 + "<m>")):
        stream = TextStream()
        stream.open_sink(Content)
        assert run(stream.read_until(("<m>",)), stream, *pieces) == "<m>"
        assert "".join(part.text for part in stream.take_parts()) == " " * 36
