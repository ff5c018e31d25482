"""Size limits of fields, and the field that an error names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from quire.frontend.server.http.bodies import (
    MAX_OTHER_VALUES,
    SMALL_BODY,
    FieldLimit,
    decode,
    exceeds,
)
from quire.frontend.server.http.errors import ApiError

MOST = FieldLimit().max_values  # of stop_token_ids


class Body(msgspec.Struct, kw_only=True):
    prompt: str | list[int]
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    metadata: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ([1] * 10, 10),
        ([[1, 2], [3, [4]], {}], 9),
        ({"a": 1, "b": [1, 2]}, 4),
        ("a, [b], {c}", 0),
        (['a,b "c, d', "\\", '\\"', "}{"], 4),
        ([{"type": "text", "text": ",,,"}] * 3, 9),
        (7, 0),
    ],
    ids=str,
)
def test_values_are_counted_outside_of_strings(value: object, count: int) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=1), json.dumps(value, indent=None)):
        assert not exceeds(text.encode(), max(1, count))
        assert count < 2 or exceeds(text.encode(), count - 1)


def test_a_text_with_many_quotes_is_counted_without_parsing() -> None:
    assert exceeds(json.dumps(["a"] * 1000).encode(), 100)
    assert not exceeds(json.dumps('",' * 1000).encode(), 100)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"stop_token_ids": [1] * (MOST + 1)}, "stop_token_ids", "array_above_max_length"),
        ({"bad_words": ["x" * SMALL_BODY]}, "bad_words", "string_above_max_length"),
        ({"metadata": {"x": [1] * 10_001}}, "metadata", "array_above_max_length"),
        ({"metadata": {"x": "y" * 2**20}}, "metadata", "string_above_max_length"),
        ({"unknown": [1] * (MAX_OTHER_VALUES + 2)}, None, "array_above_max_length"),
        (
            {f"unknown{i}": 1 for i in range(MAX_OTHER_VALUES + 2)},
            None,
            "array_above_max_length",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_too_large_fields_are_named(fields: dict, param: str | None, code: str) -> None:
    raw = json.dumps({"prompt": "a"} | fields).encode()
    with pytest.raises(ApiError) as caught:
        decode(raw, Body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert param is None or f"'{param}' must have at most" in caught.value.message


def test_a_duplicate_field_is_counted_twice() -> None:
    ids = ("1," * MOST)[:-1]
    raw = '{"prompt": "a"' + f', "stop_token_ids": [{ids}]' * 8 + "}"
    with pytest.raises(ApiError, match="unknown or repeated fields"):
        decode(raw.encode(), Body)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [1] * MOST},
        {"prompt": "word, [" * 1_000_000},
        {"prompt": [1] * 900_000},
        {"prompt": '"' * 100_000, "metadata": {"a": ["b"] * 5_000}},
        {"unknown": [1] * 10_000},
    ],
    ids=lambda value: str(value)[:40],
)
def test_fields_within_the_limits_are_decoded(fields: dict) -> None:
    fields = {"prompt": "a"} | fields
    body, unknown = decode(json.dumps(fields).encode(), Body)
    known = {name: value for name, value in fields.items() if name != "unknown"}
    assert {name: getattr(body, name) for name in known} == known
    assert unknown == sorted(fields.keys() - known.keys())


@pytest.mark.parametrize(
    "raw",
    [b"[" + b"1," * SMALL_BODY + b"1]", b'{"prompt": ' + b"[" * SMALL_BODY, b"x" * SMALL_BODY * 2],
)
def test_large_bodies_that_are_not_a_json_object(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode(raw, Body)
    assert caught.value.status == 400
