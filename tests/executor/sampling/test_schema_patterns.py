"""Patterns made of patterns, against Python's own: every short text has one or the other."""

from __future__ import annotations

import itertools
import random
import re
import time

import pytest
from quire.executor.sampling import schema_patterns
from quire.executor.sampling.schema_patterns import PatternError, are_apart, common, complement

LETTERS = "ab5\n"
TEXTS = ["".join(one) for n in range(6) for one in itertools.product(LETTERS, repeat=n)]
PATTERNS = [
    *("", "a", "^a", "a$", "^$", "^ab?$", "a|^b|5$", "^(a|b5)*$", "[^a]5", "a.b", r"\d\w", r"\s\D"),
    *("^(?:a{2,3}|b)+$", "a{2}", "(^|5)b(5|$)", "^(?!a)", "^(?=.*a)(?=.*5)", "a(?!5|$)", "^^a$$"),
    *("^a*?b", "[a-b]{0,2}5", "b(?=a)a", "(?!a)(?!b)", "^(?!.*ab)[ab]*$", r"^[\s\S]{2,3}$"),
    *("5$b", "5$b*", "^(b?(a|55)($|b))*$", "^([^a]+(a|$)){2,}$", "(?!a*$)[ab]5"),
    *("^((?!ab)(?!5).)*$", "^(?:(?!b5)[ab5])+b", "^(a(?=b|$)|b){1,3}$", "(?:(?=.a)b(?:(?!5)a)*)+5"),
    *("b$|$a", "(?:(?:a|$)+5?){2}", "a(?=$|b)b?$"),
]


def has(pattern: str, text: str) -> bool:
    """As in ECMAScript and Rust, where "$" is the end, not also a place before a line's end."""
    return re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None


def has_one(pattern: str | None, text: str) -> bool:
    return pattern is not None and has(pattern, text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_text_has_a_pattern_or_its_complement(pattern) -> None:
    opposite = complement(pattern)
    assert [text for text in TEXTS if has(pattern, text) == has_one(opposite, text)] == []


@pytest.mark.parametrize("step", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_what_patterns_share(step: int) -> None:
    """Of every second or every fifth pattern with every third or every sixth one."""
    for one, other in itertools.product(PATTERNS[::step], PATTERNS[1 :: step + 1]):
        both = [text for text in TEXTS if has(one, text) and has(other, text)]
        only = [text for text in TEXTS if has(one, text) and not has(other, text)]
        for made, expected in ((common([one, other]), both), (common([one], [other]), only)):
            assert [text for text in TEXTS if has_one(made, text)] == expected
        assert not (both and are_apart(one, other))
    assert are_apart("^a", "^b") and common(["^a", "^b"]) is None


@pytest.mark.slow
def test_random_patterns() -> None:
    draw, num_refused = random.Random(0), 0
    for _ in range(2_000):
        pattern = draw.choice(["", "^"]) + random_pattern(draw, 3) + draw.choice(["", "$"])
        try:
            opposite = complement(pattern)
        except PatternError as error:
            assert "too large" in str(error)
            num_refused += 1
            continue
        assert [text for text in TEXTS if has(pattern, text) == has_one(opposite, text)] == []
    assert num_refused < 20


def random_pattern(draw: random.Random, depth: int) -> str:
    if depth == 0:
        return draw.choice(["a", "b", "5", ".", "[^a]", r"\d", "[a5]", "$"])
    parts = [random_pattern(draw, depth - 1) for _ in range(draw.randint(1, 2))]
    made = draw.choice(["", "|"]).join(parts)
    return f"(?:{made})" + draw.choice(["", "", "*", "+", "?", "{2}"])


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"(a)\1", "groupref"),
        (r"\ba", "at_boundary"),
        ("(?<=a)b", "assert"),
        ("(?i)a", "flags"),
        ("a^b", "at_beginning"),
        ("$^", "at_beginning"),
        ("(?:a*(?=b))*", "repeat"),
        ("(", "not understood"),
        ("^.{500}$", "repeat"),
        (".{14}(?:a.{14}){9}x", "too large"),
    ],
)
def test_what_is_not_known_is_refused_by_name(pattern, words) -> None:
    with pytest.raises(PatternError, match=words):
        complement(pattern)
    assert not are_apart(pattern, "^c")


def test_a_large_pattern_is_refused_before_it_takes_long(monkeypatch) -> None:
    """An automaton of "a, then any 20" has 2**20 states."""
    start = time.thread_time()
    with pytest.raises(PatternError, match="too large"):
        complement("a.{20}$")
    assert time.thread_time() - start < 20
    monkeypatch.setattr(schema_patterns, "MAX_STATES", 3)
    with pytest.raises(PatternError, match="too large"):
        complement("^abc$")


def test_what_differs_at_the_start_is_told_apart_there(monkeypatch) -> None:
    """Not by states for places further on, where "^" is not found."""
    monkeypatch.setattr(schema_patterns, "MAX_STATES", 4)
    assert are_apart("^a" + "b" * 50, "^b" + "a" * 50)
    assert are_apart("^a" + "b" * 50 + "|^5a", "^b" + "a" * 50)
    assert not are_apart("^ab", "^a" + "b" * 50)
