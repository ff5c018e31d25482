"""Random schemas, regexes and choices, and a check that a text matches them, with jsonschema, re
and equality.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
from quire.ipc.params import STRUCTURED_KINDS, StructuredOutputsParams

WORDS = (
    "name",
    "age",
    "id",
    "x",
    "tags",
    "last name",
    "ü",
    "a/b",
    'q"q',
    "point",
    "kind",
    "items",
    "$ref",
    "0",
    "value_2",
)
LITERALS = "abcxyz019 _-@:.,é"
# Without \d, \w and \s: Rust and Python define them by Unicode, but of different versions, and
# differ in which characters are letters. In a schema's patterns llguidance makes them ASCII, so \d
# and \w are subsets of Python's.
CLASSES = (
    "[a-z]",
    "[A-Z0-9]",
    "[^a-z ]",
    "[0-9]",
    "[0-9a-f]",
    "[_-]",
    ".",
    "[a-zA-Z0-9_]",
    "[áéí]",
    "[ \\t]",
)
# llguidance checks only the shape of formats: it accepts day 31 in any month, and the year 0, which
# Python's dates do not have.
FORMAT_CHECKER = jsonschema.FormatChecker(("ipv4", "ipv6", "uuid", "email"))
FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email")


def random_params(seed: int) -> StructuredOutputsParams:
    """Depends on the seed alone: half schemas, a third regexes, the rest choices and objects."""
    rng = random.Random(seed)
    kind = rng.choices(["json", "regex", "choice", "json_object"], [50, 33, 15, 2])[0]
    if kind == "json":
        schema = random_schema(rng, 3)
        whitespace = rng.choices(
            [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}], [1, 6, 3]
        )[0]
        return StructuredOutputsParams(
            json=schema if rng.random() < 0.5 else json.dumps(schema), **whitespace
        )
    if kind == "regex":
        return StructuredOutputsParams(regex=random_regex(rng, 3))
    if kind == "choice":
        return StructuredOutputsParams(choice=[random_text(rng) for _ in range(rng.randint(1, 12))])
    return StructuredOutputsParams(json_object=True, disable_any_whitespace=True)


def random_text(rng: random.Random) -> str:
    alphabet = LITERALS + "\\|()[]{}^$*+?\n\t\"'/😀"
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 10)))


# ---------------------------------------------------------------- regexes


def random_regex(rng: random.Random, depth: int) -> str:
    kind = rng.choice(
        ["literal", "class", "sequence", "alternatives", "repeated", "group"]
        if depth
        else ["literal", "class"]
    )
    if kind == "literal":
        return "".join(re.escape(rng.choice(LITERALS)) for _ in range(rng.randint(1, 4)))
    if kind == "class":
        return rng.choice(CLASSES)
    if kind == "sequence":
        return "".join(f"(?:{random_regex(rng, depth - 1)})" for _ in range(rng.randint(2, 4)))
    if kind == "alternatives":
        return "|".join(random_regex(rng, depth - 1) for _ in range(rng.randint(2, 4)))
    if kind == "group":
        return f"({random_regex(rng, depth - 1)})"
    low = rng.randint(0, 4)
    count = rng.choice(
        ["?", "*", "+", f"{{{low}}}", f"{{{low},{low + rng.randint(0, 6)}}}", f"{{{low},}}"]
    )
    return f"(?:{random_regex(rng, depth - 1)}){count}"


# ---------------------------------------------------------------- schemas


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    simple = [_string, _integer, _number, _enum, _constant, _plain]
    nested = [_object, _array, _tuple, _any_of, _reference]
    if not depth:
        return rng.choice(simple)(rng, depth)
    return rng.choices([rng.choice(simple), *nested], [6, 6, 2, 2, 2, 1])[0](rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(["length", "length", "pattern", "format"])
    if kind == "pattern":
        pattern = random_regex(rng, 2).replace("[0-9]", "\\d").replace("[a-zA-Z0-9_]", "\\w")
        return {"type": "string", "pattern": f"^(?:{pattern})$"}
    if kind == "format":
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 5000)}
    return {
        "type": "integer",
        **rng.choice(
            [
                bounds,
                bounds,
                {"exclusiveMinimum": low, "exclusiveMaximum": low + 7},
                {"multipleOf": 5, **bounds},
            ]
        ),
    }


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = round(rng.uniform(-100, 100), rng.randint(0, 3))
    bounds = {"minimum": low, "maximum": low + rng.randint(1, 50)}
    return {
        "type": "number",
        **rng.choices(
            [
                bounds,
                {**bounds, "multipleOf": 0.25},
                {"multipleOf": 0.5, "minimum": 0, "maximum": 9},
            ],
            [1, 3, 3],
        )[0],
    }


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": [_value(rng) for _ in range(rng.randint(1, 6))]}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": _value(rng)}


def _value(rng: random.Random) -> Any:
    return rng.choice(
        [None, True, False, rng.randint(-9, 99), 1.5, random_text(rng), [], [1, "a"], {"k": 1}]
    )


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
        ]
    )


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
    }
    schema["required"] = [name for name in names if rng.random() < 0.6]
    more = rng.choices([False, True, {"type": "integer", "minimum": 0, "maximum": 9}], [8, 1, 2])[0]
    return schema if more is True else {**schema, "additionalProperties": more}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 3),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {
        "type": "array",
        "prefixItems": items,
        "items": False,
        "minItems": rng.randint(0, len(items)),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    """A chain of any length. Its $id makes it the root that "#" refers to inside."""
    following = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
    return {
        "$id": f"urn:node:{rng.randint(0, 10**9)}",
        "type": "object",
        "properties": {"next": following, "v": _integer(rng, 0)},
        "required": ["next"],
        "additionalProperties": False,
    }


def is_bounded(schema: Any) -> bool:
    """Whether every value has a limited length: no recursion, no properties or items beyond those
    listed, no number with unlimited decimals.

    Other unlimited values (fractions of a second, repetition in a pattern) are not recognised.
    """
    if isinstance(schema, list):
        return all(map(is_bounded, schema))
    if not isinstance(schema, dict):
        return True
    is_open = schema.get("type") == "object" and schema.get("additionalProperties") is not False
    is_endless = schema.get("type") == "number" and "multipleOf" not in schema
    return not (is_open or is_endless or "$ref" in schema) and all(map(is_bounded, schema.values()))


# ---------------------------------------------------------------- checks


def problem_with(text: str, params: StructuredOutputsParams) -> str | None:
    """Why the text does not match what was requested; None if it does."""
    if params.regex is not None:
        return None if re.fullmatch(params.regex, text) else "re.fullmatch finds no match"
    if params.choice is not None:
        return None if text in params.choice else "it is none of the choices"
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"it is no JSON: {error}"
    if params.json_object:
        return None if isinstance(value, dict) else "it is no object"
    schema = json.loads(params.json) if isinstance(params.json, str) else params.json
    errors = jsonschema.Draft202012Validator(schema, format_checker=FORMAT_CHECKER).iter_errors(
        value
    )
    return next((f"{error.json_path}: {error.message}" for error in errors), None)


def numbered(first: int, count: int) -> Iterator[tuple[int, StructuredOutputsParams]]:
    for seed in range(first, first + count):
        yield seed, random_params(seed)


def kind_of(params: StructuredOutputsParams) -> str:
    return next(kind for kind in STRUCTURED_KINDS if getattr(params, kind))
