"""Merged schemas, against jsonschema: the instances are those of the schema."""

from __future__ import annotations

import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from quire.executor.sampling import schema_merging
from quire.executor.sampling.schema_merging import merged
from quire.executor.sampling.schema_values import TooManyError, UnsayableError
from quire.tests.executor.sampling.test_schema_rewriting import VALUES

LEAVES: list[Any] = [
    *(True, False, {"type": "string"}, {"type": "integer"}, {"type": ["string", "null"]}),
    *({"type": "object"}, {"type": "array"}, {"type": "boolean"}, {"const": "ab"}),
    *({"const": {"a": 1}}, {"enum": [1, "a", None, [1]]}, {"minimum": 2}),
    *({"exclusiveMaximum": 2}, {"multipleOf": 2}, {"minLength": 2}, {"maxLength": 1}),
    *({"pattern": "^a"}, {"pattern": "b"}, {"maxItems": 1}, {"minItems": 2}),
    *({"required": ["a"]}, {"maxProperties": 1}, {"minProperties": 2}),
]
LIST = {"type": "object", "properties": {"a": {"$ref": "#/$defs/list"}}}


def drawn(draw: random.Random, depth: int) -> Any:
    """A schema in the keywords that a rewritten one has."""
    if not depth or draw.random() < 0.25:
        return draw.choice(LEAVES)
    parts = [drawn(draw, depth - 1) for _ in range(3)]
    name = draw.choice(("a", "b", "ab"))
    return draw.choice(
        [
            {"allOf": parts},
            {"anyOf": parts},
            {"$ref": "#/$defs/x"},
            {"type": "object", "$ref": "#/$defs/y"},
            {"properties": {name: parts[0]}, "required": ["a"]},
            {"properties": {name: parts[0]}, "additionalProperties": parts[1]},
            {"patternProperties": {"^b": parts[0]}, "additionalProperties": parts[1]},
            {"patternProperties": {"a": parts[0]}},
            {"items": parts[0], "prefixItems": parts[1:2]},
            {"type": "object", "properties": {"a": parts[0]}, "anyOf": parts[1:]},
        ]
    )


def check_instances(schema: Any) -> None:
    expected = list(filter(Draft202012Validator(schema).is_valid, VALUES))
    try:
        made = merged(schema)
    except UnsayableError as error:
        if "no value follows" not in str(error):
            raise
        made = False
    assert list(filter(Draft202012Validator(made).is_valid, VALUES)) == expected


@pytest.mark.parametrize("seed", range(12))
def test_merged_schemas_have_the_same_instances(seed) -> None:
    draw = random.Random(seed)
    num_checked = 0
    for _ in range(12):
        names = {name: drawn(draw, 2) for name in "xy"}
        schema = {"$defs": names, "allOf": [drawn(draw, 3), drawn(draw, 3)]}
        try:
            check_instances(schema)
        except UnsayableError as error:
            assert "depends on the part itself" in str(error)  # jsonschema does not end with it
        except RecursionError:  # jsonschema's
            continue
        num_checked += 1
    assert num_checked > 6


def keywords_of(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {key for one in schema for key in keywords_of(one)}
    if not isinstance(schema, dict):
        return set()
    return set(schema) | {key for one in schema.values() for key in keywords_of(one)}


def test_what_contains_itself_is_merged_with_other_keywords() -> None:
    second = {"properties": {"a": {"$ref": "#/$defs/second"}}, "required": ["b"]}
    both = [{"$ref": "#/$defs/list"}, {"$ref": "#/$defs/second"}]
    schema = {"$defs": {"list": LIST, "second": second}, "allOf": both}
    check_instances(schema)
    assert "allOf" not in keywords_of(merged(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a", "a"], "minProperties": 2},
        {"type": "object", "required": ["a", "a"], "maxProperties": 1},
        {"allOf": [{"const": {"a": 1}}, {"const": {"a": 1.0}}]},
    ],
)
def test_what_is_equal_is_one(schema) -> None:
    check_instances(schema)


SELF = {
    "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "string"}]},
    "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "object", "required": ["a"]}]},
    "c": {"anyOf": [{"$ref": "#/$defs/c", "minimum": 2}, {"properties": {"a": {"const": 1}}}]},
    "d": {
        "anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}}}]
    },
}
ANY_OF_THEM = [{"type": "string"}, {"type": "object", "required": ["a"]}]


@pytest.mark.parametrize(
    ("name", "equal"),
    [
        ("a", {"anyOf": ANY_OF_THEM}),
        ("b", {"anyOf": ANY_OF_THEM}),
        ("c", {"properties": {"a": {"const": 1}}}),
    ],
)
def test_a_branch_that_is_the_whole_adds_nothing(name, equal) -> None:
    made = Draft202012Validator(merged({"$defs": SELF, "$ref": f"#/$defs/{name}"}))
    both = {"$defs": SELF, "allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}
    if name != "c":
        assert merged(both)["$defs"]
    expected = list(filter(Draft202012Validator(equal).is_valid, VALUES))
    assert list(filter(made.is_valid, VALUES)) == expected


def mutual(size: int) -> Any:
    """Schemas each of which is any of the others, or a type of its own."""
    names = [f"x{i}" for i in range(size)]
    return {
        "$defs": {
            name: {
                "anyOf": [{"const": name}, *({"$ref": f"#/$defs/{o}"} for o in names if o != name)]
            }
            for name in names
        },
        "$ref": "#/$defs/x0",
    }


def test_branches_that_name_each_other_are_refused_before_their_orders_are_all_tried(
    monkeypatch,
) -> None:
    made = Draft202012Validator(merged(mutual(4)))
    assert all(made.is_valid(f"x{i}") for i in range(4)) and not made.is_valid("x4")
    assert schema_merging.MAX_FINDS < 100_000
    monkeypatch.setattr(schema_merging, "MAX_FINDS", 500)
    with pytest.raises(TooManyError):
        merged(mutual(11))  # whose 11! orders take hours


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("least", [0, 1, 2, 3])
@pytest.mark.parametrize("most", [0, 1, 2, None])
def test_properties_are_counted_where_all_that_are_listed_are_required(is_open, least, most):
    schema = {"type": "object", "properties": {"a": True, "b": True, "c": {"type": "null"}}}
    schema |= {"additionalProperties": is_open, "allOf": [{"minProperties": least}]}
    if most is not None:
        schema["maxProperties"] = most
    check_instances(schema)
    for one in objects_of(merged(schema)) if least <= (3 if most is None else most) else ():
        if one.keys() & {"minProperties", "maxProperties"}:
            listed = {name for name, part in one["properties"].items() if part is not False}
            assert listed <= set(one.get("required", ()))


def objects_of(schema: Any) -> list[dict[str, Any]]:
    inner = schema.values() if isinstance(schema, dict) else schema
    own = [schema] if isinstance(schema, dict) and schema.get("type") == "object" else []
    parts = [one for one in inner if isinstance(one, (dict, list))]
    return [*own, *(found for one in parts for found in objects_of(one))]


def test_equal_combinations_are_merged_once() -> None:
    """Otherwise as many as there are ways to get there: 2 ** 20."""
    names = {}
    for i in range(20):
        following = {"$ref": f"#/$defs/x{i + 1}"}
        names[f"x{i}"] = {"properties": {"a": following, "b": {"allOf": [following, {}]}}}
    schema = {"$defs": {**names, "x20": {"type": "string"}}, "allOf": [{"$ref": "#/$defs/x0"}]}
    assert len(merged(schema)["$defs"]) < 50


def test_properties_keep_their_order() -> None:
    first = {"properties": {"b": True, "a": {"type": "string"}}}
    schema = {
        "type": "object",
        "allOf": [first, {"properties": {"c": True, "a": {"minLength": 1}}}],
    }
    found = merged(schema)
    found = found["$defs"][found["$ref"].rsplit("/", 1)[1]]
    assert list(found["properties"]) == ["b", "a", "c"]


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 5, "notMultipleOf": [10]},
        {"type": "integer", "notMultipleOf": [2, 3], "minimum": 1000},
        {"notMultipleOf": [2]},
        {"notMultipleOf": [0.1], "maximum": -3.05},
        {"enum": [1, 2, 2.5], "notMultipleOf": [2]},
    ],
)
def test_no_number_is_a_multiple_of_what_it_must_not_be(schema) -> None:
    made = Draft202012Validator(merged({"type": "number", **schema}))
    right = {key: value for key, value in schema.items() if key != "notMultipleOf"}
    opposites = [{"not": {"multipleOf": step}} for step in schema["notMultipleOf"]]
    original = Draft202012Validator({"type": "number", **right, "allOf": opposites})
    numbers = [i / 4 for i in range(-80, 80)] + [1000.5, *range(990, 1020), -3.1, -3.05, -3.15]
    found = list(filter(made.is_valid, numbers))
    assert found
    assert all(map(original.is_valid, found))


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value follows"),
        ({"allOf": [{"minimum": 3}, {"maximum": 2}], "type": "number"}, "no value follows"),
        ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, "no value follows"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "no value"),
        ({"properties": {f"p{i}": True for i in range(9)}, "maxProperties": 6}, "of 9 optional"),
        (
            {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]},
            "too many",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused(schema, words) -> None:
    with pytest.raises(UnsayableError, match=words):
        merged(schema)
