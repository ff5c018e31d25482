"""Types that schemas allow, and conversion of untyped text to JSON by them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.frontend.answer_format.argument_types import (
    allowed_types,
    can_stand_alone,
    plain_arguments,
    read_literal,
    to_json,
)

ROOT = {
    "$defs": {
        "Unit": {"enum": ["C", "F"]},
        "Loop": {"$ref": "#/$defs/Loop"},
        "a/b": {"type": "null"},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, {"string"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"$ref": "#/$defs/Unit"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"null"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/nowhere"}, set()),
        ({"$ref": "https://example.com/schema"}, set()),
        ({"properties": {}}, {"object"}),
        ({}, set()),
        (True, set()),
        (None, set()),
        ({"type": [{}]}, set()),
    ],
)
def test_allowed_types(schema, types) -> None:
    assert allowed_types(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string"}, "5"),
        ("5", {"integer"}, 5),
        (" 5\n", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5", {"number"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("1e3", {"number"}, 1000.0),
        ("NaN", {"number"}, "NaN"),
        ("true", {"boolean"}, True),
        ("True", {"boolean"}, True),
        ("5", {"boolean"}, "5"),
        ("null", {"string", "null"}, None),
        ("None", {"string", "null"}, None),
        ("nothing", {"string", "null"}, "nothing"),
        ("7", {"string", "null"}, "7"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': True, 'b': (1, -2)}", {"object"}, {"a": True, "b": [1, -2]}),
        ("[1, 'x', null]", {"array"}, [1, "x", None]),
        ("{broken", {"object"}, "{broken"),
        ("5", set(), 5),
        ("Paris", set(), "Paris"),
        ('"Paris"', set(), '"Paris"'),
        ("[" * 5000, {"array"}, "[" * 5000),
        ("__import__('os')", {"object"}, "__import__('os')"),
        ("1e999", {"number"}, "1e999"),
    ],
)
def test_text_is_converted_to_an_allowed_type(text, types, value) -> None:
    assert json.loads(to_json(text, frozenset(types))) == value


@settings(deadline=None)
@given(
    st.text(),
    st.sets(st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])),
)
def test_any_text_can_be_converted_to_json(text, types) -> None:
    json.loads(to_json(text, frozenset(types)), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "text", ["f()", "a", "1 + 2", "{1: 2}", "{**{}}", "b'x'", "...", "1j", "-'x'", "lambda: 0", ""]
)
def test_only_plain_literals(text) -> None:
    with pytest.raises(ValueError):
        read_literal(text)


def test_arguments_one_by_one() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"$ref": "#/$defs/U"}},
        "required": ["a"],
        "$defs": {"U": {}},
    }
    assert plain_arguments(schema) == {
        "a": ({"type": "string", "$defs": {"U": {}}}, True),
        "b": ({"$ref": "#/$defs/U", "$defs": {"U": {}}}, False),
    }
    for demanding in (
        {"allOf": []},
        {"required": ["x"]},
        {"properties": {"a b": {}}},
        {"properties": {"a": True}},
        {"minProperties": 1},
        {"properties": {"a": {"$ref": "#"}}},
    ):
        assert plain_arguments({"type": "object", **demanding}) is None


@pytest.mark.parametrize(
    ("schema", "can"),
    [
        ({"type": "string"}, True),
        ({"type": "string", "enum": ["a", "b c"]}, True),
        ({"type": "string", "enum": [" a"]}, False),
        ({"type": "string", "maxLength": 3}, False),
        ({"type": ["string", "null"]}, False),
        ({"type": ["integer", "null"]}, True),
        ({}, False),
    ],
)
def test_texts_that_need_no_quotes(schema, can) -> None:
    assert can_stand_alone(schema, allowed_types(schema, {})) is can
