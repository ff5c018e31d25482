"""Rewritten schemas, against jsonschema: what follows one follows the original."""

from __future__ import annotations

import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from quire.executor.sampling.schema_rewriting import (
    MAX_SCHEMAS,
    UnsayableError,
    in_ways,
    rewritten,
)

NAMES = "a", "b", "ab"
PATTERNS = "^a", "b$", "^.$", "^(?!b)"
VALUES: list[Any] = [
    None,
    *(False, True, 0, 1, 2, 2.5, -3),
    *("", "a", "b", "ab", "abc", "x/y"),
    *([], [1], ["a"], [1, 1], [1, "a"], ["a", "b", "a"], [[1], 2], [{"a": 1}]),
    *({}, {"a": 1}, {"b": 1}, {"a": "a"}, {"a": 1, "b": "b"}, {"ab": {"a": 1}}, {"c": None}),
    *({"a": {"b": 1}}, {"a": [1, "a"]}, {"a": 1, "b": 1, "ab": 1}, {"a": {"a": {}}}),
]


def followers(schema: Any) -> list[Any]:
    return list(filter(Draft202012Validator(schema).is_valid, VALUES))


EXACT: list[dict[str, Any]] = [
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}, "b": {"properties": {"b": {"const": 1}}}}},
    {"not": {"type": "string"}},
    {"not": {"type": ["object", "null"]}},
    {"not": {"required": ["a", "b"]}},
    {"not": {"enum": ["a", "ab", "", 2, True]}},
    {"not": {"const": 1}},
    {"not": {"properties": {"a": {"type": "integer"}}}},
    {"not": {"minimum": 1}},
    {"not": {"exclusiveMaximum": 1}},
    {"not": {"minLength": 2}},
    {"not": {"maxItems": 1}},
    {"not": {"items": {"type": "integer"}}},
    {"not": {"prefixItems": [{"type": "integer"}, {"type": "string"}]}},
    {"not": {"contains": {"type": "string"}}},
    {"not": {"anyOf": [{"type": "string"}, {"required": ["a"]}]}},
    {"not": {"allOf": [{"type": "object"}, {"required": ["a"]}]}},
    {"not": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    {"not": {"not": {"pattern": "^a"}}},
    {"not": {"dependentRequired": {"a": ["b"]}}},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"type": "string"}]},
    {"oneOf": [{"enum": ["a", "x/y", 1]}, {"type": "string", "pattern": "^a"}]},
    {"oneOf": [{"type": "number"}, {"minimum": 2}]},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 1}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"if": {"properties": {"a": {"const": 1}}}, "else": {"required": ["b"]}},
    {"if": {"type": "string"}},
    {"contains": {"type": "string"}},
    {"contains": {"type": "string"}, "minContains": 0},
    {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 1},
    {"uniqueItems": True, "maxItems": 1},
    {"allOf": [{"enum": VALUES}, {"not": {"additionalProperties": {"type": "integer"}}}]},
    {"allOf": [{"enum": VALUES}], "patternProperties": {"^a": {"type": "string"}}, "required": []},
    {"allOf": [{"enum": [{"b": 1}]}, {"not": {"patternProperties": {"^b": False}}}, {}]},
    {"anyOf": [{"allOf": [{"const": "a"}, {"not": {"const": "a"}}]}, {"type": "null"}]},
    {"uniqueItems": False},
    {"propertyNames": {"pattern": "^a"}},
    {"propertyNames": {"enum": ["a", 1]}},
    {"propertyNames": {"maxLength": 1}},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": False},
    {"not": {"propertyNames": False}},
    {"minProperties": 2, "required": ["a"]},
    {"properties": {"a": {}, "b": {}}, "maxProperties": 1, "additionalProperties": False},
    {"properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False},
    {"type": "number", "anyOf": [{"type": "integer"}, {"type": "string"}], "not": False},
    {"propertyNames": {}},
    {"propertyNames": {"description": "any"}},
    {"format": "of my own"},
    {"not": {"pattern": "b"}},
    {"not": {"pattern": "^a|b$"}},
    {"not": {"const": [1, "a"]}},
    {"not": {"enum": [{"a": 1}, {}, [], [1], "a", {"a": {"b": 1}}]}},
    {"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"type": "object"}]},
    {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^x"}]},
    {"pattern": "^(?!a).{2}"},
    {"pattern": "^(?=.*b)a(?!bc)"},
    {"propertyNames": {"pattern": "^a", "maxLength": 1}},
    {"propertyNames": {"anyOf": [{"const": "a"}, {"minLength": 2}]}},
    {"propertyNames": {"multipleOf": 2}},
    {"propertyNames": {"not": {"pattern": "^a"}}},
    {"patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 2}, "^ab$": {"const": 5}}},
    {"items": {"$id": "x", "type": "integer"}},
    {
        "$defs": {"t": {"properties": {"a": {"$ref": "#/$defs/t", "required": ["b"]}}}},
        "$ref": "#/$defs/t",
    },
    {
        "$ref": "#/$defs/x~1y",
        "$defs": {"x/y": {"not": {"$ref": "#/$defs/z"}}, "z": {"type": "null"}},
    },
    {
        "$defs": {"n": {"properties": {"a": {"oneOf": [{"$ref": "#/$defs/n"}]}}}},
        "$ref": "#/$defs/n",
    },
    {"oneOf": [{"$ref": "#"}, {"type": "null"}], "type": "null", "not": {"$ref": "#/$defs/no"}}
    | {"$defs": {"no": {"type": "null"}}},
]


@pytest.mark.parametrize("schema", EXACT, ids=str)
def test_keywords_that_can_be_said(schema) -> None:
    made = rewritten(schema) if "#" not in str(schema.get("oneOf")) else None
    if made is None:
        with pytest.raises(UnsayableError):
            rewritten(schema)
        return
    assert followers(made) == followers(schema)
    assert not {"not", "if", "oneOf", "contains", "uniqueItems", "propertyNames"} & keywords(made)


def keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {key for one in schema for key in keywords(one)}
    if not isinstance(schema, dict):
        return set()
    return schema.keys() | {key for one in schema.values() for key in keywords(one)}


def test_a_property_with_a_name_of_another_kind() -> None:
    """The other properties have such names, too: no grammar says "one of them" of patterns."""
    schema = {"not": {"propertyNames": {"pattern": "^a$"}}}
    found = followers(rewritten(schema))
    assert found == [{"b": 1}, {"ab": {"a": 1}}, {"c": None}]
    assert [value for value in found if value not in followers(schema)] == []
    one_name = {"not": {"propertyNames": {"not": {"const": "b"}}}}
    assert followers(rewritten(one_name)) == followers(one_name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("date-time", "2026-11-27T10:00:00Z"),
        ("time", "10:00:00+01:00"),
        ("date", "2026-11-27"),
        ("duration", "P1DT2H"),
        ("email", "a@b.org"),
        ("hostname", "a-b.example.org"),
        ("ipv4", "10.0.0.1"),
        ("ipv6", "::1"),
        ("uri", "urn:isbn:1"),
        ("uuid", "01234567-89AB-cdef-0123-456789abcdef"),
        ("json-pointer", "/a/b"),
    ],
)
def test_the_opposite_of_a_format(name, text) -> None:
    """It has no string of the format, and some others."""
    is_valid = Draft202012Validator(rewritten({"not": {"format": name}})).is_valid
    assert not is_valid(text)
    assert is_valid("a b:")


# The older drafts' words for what a newer schema says.
OLDER = [
    ({"dependencies": {"a": ["b"]}}, {"dependentRequired": {"a": ["b"]}}),
    ({"dependencies": {"a": "b"}}, {"dependentRequired": {"a": ["b"]}}),
    (
        {"dependencies": {"a": {"required": ["b"]}, "b": ["a"]}},
        {"dependentSchemas": {"a": {"required": ["b"]}}, "dependentRequired": {"b": ["a"]}},
    ),
    ({"not": {"minimum": 1, "exclusiveMinimum": True}}, {"not": {"exclusiveMinimum": 1}}),
    ({"not": {"items": [{"type": "integer"}]}}, {"not": {"prefixItems": [{"type": "integer"}]}}),
]


@pytest.mark.parametrize(("old", "new"), OLDER, ids=str)
def test_older_drafts(old, new) -> None:
    assert followers(rewritten(old)) == followers(new)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"uniqueItems": True}, 'uniqueItems of any items; {"x-guidance"'),
        ({"not": {"pattern": r"(a)\1"}}, "the opposite of pattern: .* groupref"),
        ({"pattern": r"^(?=(a)\1)"}, "a pattern: .* groupref"),
        ({"not": {"unevaluatedItems": False}}, "opposite of unevaluatedItems"),
        ({"contains": True, "minContains": 2}, "how many items"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"not": {}}, "no value follows"),
        ({"not": {"propertyNames": {}}}, "no value follows"),
        ({"type": "string", "not": {"type": "string"}}, "no value follows"),
        ({"$ref": "other.json"}, "other.json"),
        ({"$ref": "#/$defs/a"}, "names no part"),
        ({"$defs": {"a": {"$id": "b", "$ref": "#/c"}}, "$ref": "#/$defs/a"}, r"an \$id"),
        ({"propertyNames": {"format": "email"}}, "propertyNames of format email"),
        ({"allOf": [3]}, "must be an object or a boolean"),
    ],
    ids=str,
)
def test_what_a_grammar_cannot_say_is_refused_by_name(schema, words) -> None:
    with pytest.raises(UnsayableError, match=words):
        rewritten(schema)


def test_what_cannot_be_said_once_cannot_be_said_again() -> None:
    """The condition can be left out, for what lacks "a"; the property cannot."""
    named = {"$ref": "#/$defs/x"}
    condition = {"if": {"properties": {"a": named}, "required": ["a"]}, "then": {"type": "object"}}
    condition["$defs"] = {"x": {"uniqueItems": True}}
    assert followers(rewritten(condition)) == followers({"not": {"required": ["a"]}})
    with pytest.raises(UnsayableError, match="uniqueItems"):
        rewritten({**condition, "properties": {"b": named}})


def test_a_large_schema_is_refused_in_time() -> None:
    branch = {"properties": {f"p{i}": {"const": i} for i in range(300)}}
    schema = {"oneOf": [{**branch, "required": [f"p{i}"]} for i in range(300)]}
    with pytest.raises(UnsayableError, match="exclude each other"):
        rewritten(schema)
    assert MAX_SCHEMAS < 300 * 300  # so that all of it would be more
    deep: Any = {}
    for _ in range(100_000):
        deep = {"not": deep}
    with pytest.raises(UnsayableError, match="too deeply"):
        rewritten(deep)


def test_lists_of_few_unique_items_are_all_that_is_said() -> None:
    """What they follow anyway would be combined with each of them."""
    schema = {"type": "array", "items": {"enum": list("abcdefghij")}, "uniqueItems": True}
    made = rewritten({**schema, "minItems": 2, "title": "x"})
    assert made.keys() == {"enum", "$defs"} and len(made["enum"]) == 2**10 - 10 - 1
    assert all(Draft202012Validator(schema).is_valid(one) for one in made["enum"])
    with pytest.raises(UnsayableError, match="of 11 values"):
        rewritten({**schema, "items": {"enum": list("abcdefghijk")}})


def test_whole_numbers_start_where_llguidance_can_say_them() -> None:
    schema = {"type": "integer", "minimum": -(2**63)}
    assert rewritten(schema)["minimum"] == -(2**63) + 1024
    for types in ("number", ["integer", "number"]):
        assert rewritten({**schema, "type": types})["minimum"] == -(2**63)
    assert rewritten({**schema, "minimum": 0})["minimum"] == 0


@pytest.mark.parametrize(
    ("pattern", "plain"), [(r"^\<a\>", "^<a>"), (r"\\<", r"\\<"), (r"\\\<", r"\\<")]
)
def test_what_is_escaped_for_nothing_is_itself(pattern, plain) -> None:
    """In Rust, an escaped "<" is the start of a word."""
    assert rewritten({"type": "string", "pattern": pattern})["allOf"][1] == {"pattern": plain}


def test_the_ways_that_are_kept_take_no_property_away() -> None:
    """As long as there are others; those of properties that only another branch lists are short."""
    own = {"type": "object", "properties": {"a": True, "b": True}}
    small = {"properties": {"b": {"minimum": 10}}, "required": ["a"], "type": "object"}
    made, leaves_out = in_ways({"oneOf": [own, small]}, max_ways=1)
    assert leaves_out and Draft202012Validator(made).is_valid({"a": 1, "b": 1})
    other = {"properties": {"c": {"minimum": 10}}, "required": ["c"], "type": "object"}
    made, leaves_out = in_ways({"oneOf": [own, other]}, max_ways=1)
    assert leaves_out and Draft202012Validator(made).is_valid({"a": 1, "b": 1})
    assert not in_ways({"oneOf": [own, other]}, max_ways=4)[1]


def random_schema(draw: random.Random, depth: int, defs: list[str]) -> Any:
    if depth == 0:
        types = "string", "integer", "number", "object", "array", "null"
        simple = [True, {"type": draw.choice(types)}, *({"$ref": f"#/$defs/{d}"} for d in defs)]
        simple += [{"const": draw.choice(VALUES)}, {"required": [draw.choice(NAMES)]}]
        return draw.choice(
            [*simple, {"pattern": draw.choice(PATTERNS)}, {"minimum": 1}, {"maxLength": 1}]
        )

    def inner() -> Any:
        return random_schema(draw, depth - 1, defs)

    def some() -> list[Any]:
        return [inner() for _ in range(draw.randint(1, 3))]

    def by_name() -> dict[str, Any]:
        return {name: inner() for name in draw.sample(NAMES, draw.randint(1, 2))}

    makers: dict[str, Any] = {
        "type": lambda: draw.choice(["object", "array", "string", ["object", "null"]]),
        "enum": lambda: draw.sample(VALUES, 4),
        "properties": by_name,
        "additionalProperties": inner,
        "patternProperties": lambda: {name: inner() for name in draw.sample(PATTERNS, 2)},
        "required": lambda: draw.sample(NAMES, 1),
        "propertyNames": inner,
        "minProperties": lambda: draw.randint(0, 2),
        "maxProperties": lambda: draw.randint(0, 2),
        "dependentRequired": lambda: {draw.choice(NAMES): draw.sample(NAMES, 1)},
        "dependentSchemas": by_name,
        "items": inner,
        "prefixItems": some,
        "contains": inner,
        "minItems": lambda: draw.randint(0, 2),
        "uniqueItems": lambda: True,
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
    }
    keys = draw.sample(sorted(makers), draw.randint(1, 4))
    return {key: makers[key]() for key in keys}


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_follows_a_rewritten_schema_follows_the_original(first: int) -> None:
    """Also that most values are not lost."""
    num_kept = num_all = num_said = 0
    for seed in range(first, first + 30 * (1 if first == 0 else 200)):
        draw = random.Random(seed)
        defs: dict[str, Any] = {}
        for name in "xyz":  # each refers to those before it
            defs[name] = random_schema(draw, depth=draw.randint(0, 1), defs=list(defs))
        schema = random_schema(draw, depth=2, defs=list(defs)) | {"$defs": defs}
        try:
            made = rewritten(schema)
        except UnsayableError:
            continue
        expected = followers(schema)
        found = followers(made)
        assert [value for value in found if value not in expected] == [], (seed, schema, made)
        num_said, num_kept, num_all = num_said + 1, num_kept + len(found), num_all + len(expected)
    assert num_said > 10 and num_kept > 0.7 * num_all, (num_said, num_kept, num_all)
