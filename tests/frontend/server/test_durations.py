"""Durations in Ollama's forms."""

from __future__ import annotations

import pytest
from quire.frontend.server.durations import parse_duration


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("90s", 90.0),
        ("250ms", 0.25),
        ("2m.5s", 120.5),
        ("0", 0.0),
        (0, 0.0),
        ("0s", 0.0),
        ("300", 300.0),
        (12.5, 12.5),
        ("-1", -1.0),
        ("-5m", -1.0),
        (-3, -1.0),
    ],
)
def test_seconds(value: float | str, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 m", "m5", "5d", "nan", "inf", float("inf"), "-"])
def test_what_is_none(value: float | str) -> None:
    with pytest.raises(ValueError, match='must be a duration such as "5m"'):
        parse_duration(value)
