"""All or any of some schemas, against jsonschema."""

from __future__ import annotations

import itertools

import pytest
from jsonschema import Draft202012Validator
from quire.executor.sampling.schema_combinations import (
    all_of,
    any_of,
    has_item,
    of_other_types,
    only_for,
    with_names,
    with_others,
    with_property,
    without,
)
from quire.tests.executor.sampling.test_schema_rewriting import VALUES

PARTS = [
    True,
    False,
    {},
    {"type": "object"},
    {"type": ["object", "string"]},
    {"type": "integer"},
    {"type": "number"},
    {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    {"required": ["a"]},
    {"type": "object", "properties": {"a": False}},
    {"type": "object", "properties": {"b": True}, "additionalProperties": False},
    {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"b": False}}]},
    {"anyOf": [{"type": "object", "required": ["a"]}, {"enum": [1, "a"]}]},
    {"allOf": [{"type": "object"}, {"required": ["b"]}]},
]


def followers(schema) -> list:
    return list(filter(Draft202012Validator(schema).is_valid, VALUES))


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("parts", itertools.product(range(len(PARTS)), repeat=2))
def test_pairs_say_what_their_parts_say(parts) -> None:
    for third in ({"type": "object"}, PARTS[-2]):
        schemas = [*(PARTS[i] for i in parts), third]
        assert followers(all_of(schemas)) == followers({"allOf": schemas})
        assert followers(any_of(schemas)) == followers({"anyOf": schemas})


def test_what_cannot_be_is_left_out() -> None:
    closed = {"type": "object", "properties": {"a": True}, "additionalProperties": False}
    assert all_of([closed, {"anyOf": [{"type": "string"}, {"required": ["b"]}]}]) is False
    assert all_of([closed, {"anyOf": [{"type": "string"}, without(["b"])]}]) == closed
    assert all_of([]) is True and any_of([]) is False
    assert any_of([False, {"minimum": 1}]) == {"minimum": 1}


@pytest.mark.parametrize(
    ("one", "other", "is_never"),
    [
        ({"minLength": 4}, {"pattern": "^[a-z]{1,3}$"}, True),
        ({"minLength": 3}, {"pattern": "^[a-z]{1,3}$"}, False),
        ({"minLength": 4}, {"pattern": "[a-z]{1,3}$"}, False),
        ({"minLength": 4}, {"pattern": "^a$|^b$"}, False),  # not told
        ({"minLength": 2}, {"pattern": "^(?=.*abc).$"}, True),
        ({"maxLength": 2}, {"pattern": "ab.c?"}, True),
        ({"maxLength": 3}, {"pattern": "ab.c?"}, False),
        ({"maxLength": 3}, {"pattern": "(", "minLength": 3}, False),
        ({"maxLength": 3}, {"minLength": 4}, True),
    ],
)
def test_texts_of_no_length_are_left_out(one, other, is_never) -> None:
    assert (all_of([{"type": "string", **one}, other]) is False) is is_never
    assert all_of([one, other]) is not False  # for other types


def test_other_parts() -> None:
    assert followers(of_other_types(["string", "integer"])) == [
        value for value in VALUES if isinstance(value, (bool, list, dict)) or value is None
    ]
    assert of_other_types(["null", "boolean", "number", "string", "array", "object"]) is False
    assert followers(only_for("string", {"maxLength": 1})) == followers({"maxLength": 1})
    assert followers(has_item({"type": "string"}, 1)) == [[1, "a"], ["a", "b", "a"]]
    assert followers(with_property("a", {"type": "string"})) == [{"a": "a"}]
    assert followers(with_others(without(["a"]), {"type": "null"})) == [{"c": None}]
    assert followers(with_names("^ab", True)) == [{"ab": {"a": 1}}]
    assert has_item(False, 0) is with_property("a", False) is with_names("a", False) is False
