"""SseParser: the rules of the format, however the bytes are split."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.frontend.bench import sse
from quire.frontend.bench.sse import SseError, SseParser

EVERYTHING = (
    b": a comment\r\nevent: x\r\ndata: one\r\n\r\nid: 7\ndata:two\ndata: three\n\n\n\n"
    b": ping\n\nretry: 5\ndata:  indented\n\ndata\ndata: \xff\r\rdata: [DONE]"
)
EVENTS = [b"one", b"two\nthree", b" indented", b"\xff", b"[DONE]"]


def parse(pieces: list[bytes]) -> list[bytes]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def test_line_ends_comments_fields_and_several_data_lines() -> None:
    assert parse([EVERYTHING]) == EVENTS


def test_byte_by_byte_gives_the_same() -> None:
    assert parse([EVERYTHING[i : i + 1] for i in range(len(EVERYTHING))]) == EVENTS


@given(st.lists(st.integers(0, len(EVERYTHING)), max_size=8))
def test_splits_do_not_matter(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(EVERYTHING)]
    assert parse([EVERYTHING[a:b] for a, b in itertools.pairwise(places)]) == EVENTS


def test_an_event_comes_with_its_blank_line_and_not_before() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\ndata: b") == [b"a"]
    assert parser.feed(b"\n\n") == [b"b"]
    assert parser.finish() == []


def test_only_line_ends_of_the_format_end_a_line() -> None:
    assert parse(["data: a\x0b\x0c\x1c\x85\u2028b\n\n".encode()]) == [
        "a\x0b\x0c\x1c\x85\u2028b".encode()
    ]


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = SseParser()
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(SseError, match="more than 100 bytes"):
        parser.feed(b"x" * 10)
