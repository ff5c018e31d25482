"""What parts of a schema say about single values, against jsonschema and Python's regexes."""

from __future__ import annotations

import re

import pytest
from jsonschema import Draft202012Validator
from quire.executor.sampling.schema_values import (
    FORMAT_PATTERNS,
    escape,
    finite_values,
    is_instance,
    key_of,
    none_of,
    types_of,
)
from quire.tests.executor.sampling.test_schema_rewriting import VALUES


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ("uri-reference", ["", "a/b?c#d", "http://u@h:80/x", "//h", "?q", "./a:b"], [" ", "%2"]),
        ("uri-reference", ["#"], ["a b", "1:2", "a\\b", "é"]),
        ("iri", ["http://é/ü", "urn:a"], ["é", "", "//h"]),
        ("iri-reference", ["é", "", "http://é"], ["a b"]),
        ("uri-template", ["", "/a/{b}", "{?x,y*}", "{+p:3}"], ["{", "{}", "a b", "{a b}"]),
        ("json-pointer", ["", "/", "/a~0b/~1", "/é"], ["a", "/~", "/~2"]),
        ("relative-json-pointer", ["0", "1/a", "12#"], ["", "01", "/a", "1a"]),
    ],
)  # fmt: skip
def test_patterns_of_formats(format, right, wrong) -> None:
    pattern = re.compile(FORMAT_PATTERNS[format])
    assert [text for text in right if not pattern.search(text)] == []
    assert [text for text in wrong if pattern.search(text)] == []


SCHEMAS = [
    {"type": "string"},
    {"type": ["integer", "array"]},
    {"const": 1},
    {"enum": [1.0, "a", True, None]},
    {"enum": ["a", 1], "type": "string"},
    {"pattern": "b$"},
    {"minLength": 1, "maxLength": 2},
    {"minimum": 1, "maximum": 2},
    {"type": "boolean"},
    {"required": ["a"]},
    {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"allOf": [{"type": "string"}, {"not": {"anyOf": [{"const": "a"}, {"minLength": 2}]}}]},
    True,
    False,
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_single_values(schema) -> None:
    is_valid = Draft202012Validator(schema).is_valid
    assert [is_instance(value, schema) for value in VALUES] == [is_valid(v) for v in VALUES]
    values = finite_values(schema)
    if values is not None:
        assert {key_of(v) for v in VALUES if is_valid(v)} <= {key_of(v) for v in values}
        assert all(map(is_valid, values))


def test_what_needs_more_than_a_look_is_not_known() -> None:
    assert is_instance(1, {"items": True}) is None
    assert is_instance(1, {"minimum": 0, "exclusiveMinimum": True}) is None
    assert is_instance("a", {"pattern": "("}) is None
    assert is_instance("a", {"allOf": [{"type": "null"}, {"items": True}]}) is False
    assert is_instance("a", {"anyOf": [{"type": "null"}, {"items": True}]}) is None
    assert is_instance({"a": 1}, {"properties": {"a": {"items": True}, "b": False}}) is None
    assert finite_values({"enum": [1], "minimum": 0}) is None
    assert finite_values({"type": "string"}) is None


@pytest.mark.parametrize(
    "values", [["a", "ab", ""], ["b-]^\\", "é"], [1, 2.5, -3], [True], [None, "a"], [[1]], [{}, 2]]
)
def test_all_but_some_values(values) -> None:
    made = Draft202012Validator(none_of(values))
    lost = {type(value) for value in values if isinstance(value, (list, dict))}
    for value in [*VALUES, *values, "b-]^", "abcd", "\n", "é "]:
        is_wanted = key_of(value) not in map(key_of, values) and type(value) not in lost
        assert made.is_valid(value) == is_wanted, (value, made.schema)


def test_keys_and_types() -> None:
    assert key_of(1) == key_of(1.0) != key_of(True)
    assert key_of([{"a": 1}]) == key_of([{"a": 1.0}]) != key_of([{"a": True}])
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert types_of({"type": "integer"}) == {"number"}
    assert types_of({"enum": [1, "a"]}) == {"number", "string"}
    assert len(types_of({})) == 6


@pytest.mark.parametrize("text", ["a-b", "]^\\", "\U0001f600 é", ".*", '"'])
def test_escaped_text_matches_itself(text) -> None:
    assert re.fullmatch(escape(text), text)
    assert re.fullmatch(f"[{escape(text)}]+", text)
