"""Converts arguments of XML-like formats, which have no types, to JSON by the tool's schema.

Must not know: where the text comes from.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from .json_text import json_of

MAX_REFERENCES = 20  # a schema may refer to itself
TYPE_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
LIMITS_OF_TEXT = frozenset(
    {
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "$ref",
    }
)
DEFINITIONS = ("$defs", "definitions")
FOREIGN_REFERENCE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')
PLAIN_KEYWORDS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "strict",
        "$schema",
        *DEFINITIONS,
    }
)
LITERAL_NAMES = {"true": True, "false": False, "null": None}


def allowed_types(schema: Any, root: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """Returns JSON's names of the types that a schema allows; the result is empty if it does not
    say.
    """
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return frozenset()
    stated = schema.get("type")
    if stated is not None:
        return frozenset(
            name
            for name in (stated if isinstance(stated, list) else [stated])
            if isinstance(name, str)
        )
    if "$ref" in schema:
        return allowed_types(_referred(schema["$ref"], root), root, depth + 1)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset(TYPE_NAMES.get(type(value), "string") for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            found = [allowed_types(branch, root, depth + 1) for branch in branches]
            return frozenset().union(*found) if all(found) or key == "allOf" else frozenset()
    return frozenset({"object"}) if "properties" in schema else frozenset()


def member_schema(schema: Any, key: str, root: dict[str, Any]) -> Any:
    """Returns what a schema says of the value of a key of an object."""
    properties = _resolved(schema, root).get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def item_schema(schema: Any, root: dict[str, Any]) -> Any:
    """Returns what a schema says of the items of an array."""
    return _resolved(schema, root).get("items")


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema that another one stands for; empty for what is none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = _referred(schema["$ref"], root)
    return schema if isinstance(schema, dict) else {}


def _referred(reference: Any, root: dict[str, Any]) -> Any:
    """Returns the target of a "#/…" reference within the schema, and None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/"):
        found = (
            found.get(name.replace("~1", "/").replace("~0", "~"))
            if isinstance(found, dict)
            else None
        )
    return found


def plain_arguments(schema: dict[str, Any]) -> dict[str, tuple[dict[str, Any], bool]] | None:
    """Returns each argument's schema (with the definitions it may refer to), and whether it is
    required.

    Returns None if the function's schema demands more, or has names that no call can write.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if (
        not isinstance(properties, dict)
        or not schema.keys() <= PLAIN_KEYWORDS
        or not isinstance(required, list)
    ):
        return None
    if not set(required) <= properties.keys() or not all(
        re.fullmatch(r"[\w.-]+", key) and isinstance(properties[key], dict) for key in properties
    ):
        return None
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    if FOREIGN_REFERENCE.search(json.dumps([properties, definitions])):
        return None
    return {key: ({**definitions, **value}, key in required) for key, value in properties.items()}


def can_stand_alone(schema: dict[str, Any], types: frozenset[str]) -> bool:
    """Tells whether a value can be written without quotes: `to_json` then returns what was meant
    for any text that follows the schema.
    """
    if types != {"string"}:
        return bool(types) and "string" not in types
    texts = schema.get("enum", [])
    return not LIMITS_OF_TEXT & schema.keys() and all(
        isinstance(text, str) and text == text.strip() for text in texts
    )


def to_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of an argument: the literal, if its type is allowed, else the text as a
    string.
    """
    if types == {"string"}:
        return json_of(text)
    try:
        value = read_literal(text)
        json_of(value)  # 1e999 has become infinite
    except (ValueError, RecursionError):
        return json_of(text)
    name = TYPE_NAMES[type(value)]
    if name == "number" and value.is_integer() and "integer" in types and "number" not in types:
        value, name = int(value), "integer"
    is_allowed = not types or name in types or (name == "integer" and "number" in types)
    return json_of(value if is_allowed and name != "string" else text)


def read_literal(text: str) -> Any:
    """Parses a value written as JSON or as Python. Raises ValueError for anything else."""
    text = text.strip()
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        return _value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError, ValueError) as error:
        raise ValueError(f"no literal: {error}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _value_of(node: ast.expr) -> Any:
    """Accepts only what JSON can express, and names only as JSON writes its constants."""
    if (
        isinstance(node, ast.Constant)
        and type(node.value) in TYPE_NAMES
        and node.value not in (float("inf"), float("-inf"))
    ):
        return node.value
    if isinstance(node, ast.Name) and node.id in LITERAL_NAMES:
        return LITERAL_NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value_of(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            _key_of(key): _value_of(value)
            for key, value in zip(node.keys, node.values, strict=True)
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value_of(node.operand)
        if type(value) in (int, float):
            return -value if isinstance(node.op, ast.USub) else value
    raise ValueError(ast.dump(node)[:50])


def _key_of(node: ast.expr | None) -> str:
    key = None if node is None else _value_of(node)
    if not isinstance(key, str):
        raise ValueError("keys must be strings")
    return key
