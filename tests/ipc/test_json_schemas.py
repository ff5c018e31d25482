"""Which objects of a schema are closed, and that what it lists stays allowed."""

from __future__ import annotations

import copy
import random
from typing import Any

import jsonschema
import pytest
from quire.ipc.errors import InvalidParameterError
from quire.ipc.json_schemas import closed_schema
from quire.tests.structured.generator import random_schema

A, B = {"a": {"type": "integer"}}, {"b": {"type": "integer"}}
CLOSED = {"additionalProperties": False}


def of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (of(A), of(A) | CLOSED),
        # what is stated stays
        (of(A, additionalProperties=True), of(A, additionalProperties=True)),
        (of(A, additionalProperties={"type": "string"}), None),
        (of(A, patternProperties={"x": {}}), None),
        (of(A, unevaluatedProperties=True), None),
        # an object that lists nothing may hold anything
        ({"type": "object"}, None),
        ({}, None),
        (True, None),
        # within others
        (of({"o": of(A)}), of({"o": of(A) | CLOSED}) | CLOSED),
        ({"type": "array", "items": of(A)}, {"type": "array", "items": of(A) | CLOSED}),
        ({"prefixItems": [of(A), of(B)]}, {"prefixItems": [of(A) | CLOSED, of(B) | CLOSED]}),
        ({"additionalProperties": of(A)}, {"additionalProperties": of(A) | CLOSED}),
        ({"anyOf": [of(A), of(B)]}, {"anyOf": [of(A) | CLOSED, of(B) | CLOSED]}),
        (
            {"$defs": {"x": of(A)}, "$ref": "#/$defs/x"},
            {"$defs": {"x": of(A) | CLOSED}, "$ref": "#/$defs/x"},
        ),
        # names that look like keywords, and values that look like schemas
        (of({"allOf": of(A)}), of({"allOf": of(A) | CLOSED}) | CLOSED),
        ({"const": of(A)}, None),
        ({"enum": [of(A)], "default": of(A)}, None),
        # a value follows two schemas together, and each may list what the other does not
        ({"allOf": [of(A), of(B)]}, None),
        (of(A, anyOf=[of(B), of({})]), None),
        (of(A, **{"if": of(B), "then": of({})}), None),
        ({"$defs": {"x": of({"o": of(A)})}, "allOf": [{"$ref": "#/$defs/x"}, of(B)]}, None),
        ({"$defs": {"x": of(A)}, "$ref": "#/$defs/x", "properties": B}, None),
        ({"$defs": {"x": of(A)}, "$ref": "#/$defs/x", "oneOf": [of(B)]}, None),
        ({"allOf": [{"$ref": "#"}], **of(A)}, None),
        ({"allOf": [{"$ref": "#/$defs/none"}], "$defs": {"x": of(A)}}, None),
        (
            {
                "$defs": {"x": {"$ref": "#/$defs/y"}, "y": of(A), "z": of(B)},
                "items": {"allOf": [{"$ref": "#/$defs/x"}]},
            },
            {
                "$defs": {"x": {"$ref": "#/$defs/y"}, "y": of(A), "z": of(B) | CLOSED},
                "items": {"allOf": [{"$ref": "#/$defs/x"}]},
            },
        ),
    ],
    ids=str,
)
def test_what_is_closed(schema, closed) -> None:
    before = copy.deepcopy(schema)
    assert closed_schema(schema) == (before if closed is None else closed)
    assert schema == before


def test_values_of_what_is_listed_stay_allowed() -> None:
    """Of schemas in combination, with the properties of both."""
    parts = [
        {"allOf": [of(A), of(B)]},
        {"$defs": {"x": of(A)}, "allOf": [{"$ref": "#/$defs/x"}, of(B)]},
        of(A, anyOf=[of(B)]),
        {"$defs": {"x": of(A)}, "$ref": "#/$defs/x", "properties": B},
        of({**A, **B}),
    ]
    for schema in parts:
        for wrapped, value in (
            (schema, {"a": 1, "b": 2}),
            ({**of({"o": schema}), "$defs": schema.get("$defs", {})}, {"o": {"a": 1, "b": 2}}),
        ):
            jsonschema.Draft202012Validator(closed_schema(wrapped)).validate(value)


def test_a_closed_schema_allows_nothing_that_the_schema_does_not() -> None:
    draw = random.Random(0)
    for _ in range(200):
        schema = random_schema(draw, 3)
        closed = closed_schema(schema)
        jsonschema.Draft202012Validator.check_schema(closed)
        for value in ({}, {"zzz": 1}, [], "a", 1, None, [{"zzz": 1}]):
            if jsonschema.Draft202012Validator(closed).is_valid(value):
                assert jsonschema.Draft202012Validator(schema).is_valid(value)


def test_a_schema_that_nests_too_deeply_is_named() -> None:
    schema: dict[str, Any] = of(A)
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidParameterError, match="nests too deeply"):
        closed_schema(schema)
    while schema:  # its own destruction would recurse, too
        schema = schema.pop("items", None)
