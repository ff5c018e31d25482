"""Any plain value survives a round trip. Repeated keys and Python objects are refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire.frontend.cli.yaml_text import dump, load

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@example("1e6")
@example(1e6)
@example({"a": "-.5E+3", "b": [1e-7]})
@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_any_value_round_trips(value: Any) -> None:
    assert load(f"name: {dump(value)}   # default\nnext: 1") == {"name": value, "next": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1e6),
        ("-1.5E-3", -0.0015),
        (".5e1", 5.0),
        ("1e", "1e"),
        ("e6", "e6"),
        ("1e6x", "1e6x"),
    ],
)
def test_numbers_need_no_point(text: str, value: Any) -> None:
    assert load(text) == value


def test_other_yaml_is_read_by_the_library_which_is_not_changed() -> None:
    text = "a: [1, 2.5, true, null, 'x']\nb: {c: d}"
    assert load(text) == yaml.safe_load(text)
    assert yaml.safe_load("1e6") == "1e6"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: {c: 1, c: 2}", "c occurs twice (line 2)"),
        ("a: [", "expected the node content, but found '<stream end>' (line 1)"),
        ("!!python/object/apply:os.getpid []", "could not determine a constructor for the tag"),
        ("a: 2026-99-99", "month must be in 1..12"),
    ],
)
def test_an_error_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(text)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
