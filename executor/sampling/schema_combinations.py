"""JSON schemas that follow from others: all or any of them, without what cannot be.

Must not know: references, llguidance's API, requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .schema_patterns import lengths
from .schema_values import TYPES, types_of

Schema = Any  # a dict or a bool


def any_of(schemas: Iterable[Schema]) -> Schema:
    kept = [schema for schema in schemas if schema is not False]
    if any(schema is True or schema == {} for schema in kept):
        return True
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def all_of(schemas: Iterable[Schema]) -> Schema:
    """All of them, where branches of an `anyOf` that exclude another one are left out."""
    kept: list[dict[str, Any]] = []
    for schema in schemas:
        if schema is False:
            return False
        if schema is not True and schema:
            kept += schema["allOf"] if schema.keys() == {"allOf"} else [schema]
    plain = [schema for schema in kept if schema.keys() != {"anyOf"}]
    if are_exclusive(plain):
        return False
    unions = []
    for union in (schema for schema in kept if schema.keys() == {"anyOf"}):
        branches = [one for one in union["anyOf"] if not are_exclusive([*plain, one])]
        if not branches:
            return False
        if not any(follows(branch, plain) for branch in branches):
            unions.append(any_of(branches))
    kept = [*plain, *unions]
    if not kept:
        return True
    return kept[0] if len(kept) == 1 else {"allOf": kept}


def are_exclusive(schemas: Sequence[dict[str, Any]]) -> bool:
    """Whether types, lengths or properties tell that nothing follows all of them."""
    types = _types_of_all(schemas)
    if not types:
        return True
    if types == {"string"}:
        return _have_no_length(schemas)
    required = {name for schema in schemas for name in schema.get("required", ())}
    return types == {"object"} and any(
        schema.get("properties", {}).get(name, not _is_closed(schema)) is False
        for schema in schemas
        for name in required
    )


def _have_no_length(schemas: Sequence[dict[str, Any]]) -> bool:
    """Whether texts with all patterns are too short or too long."""
    least = max(schema.get("minLength", 0) for schema in schemas)
    most = min(schema.get("maxLength", math.inf) for schema in schemas)
    if least == 0 and most == math.inf:
        return False
    found = [lengths(schema["pattern"]) for schema in schemas if "pattern" in schema]
    return any(longest < least or shortest > most for shortest, longest in [(least, most), *found])


def follows(schema: dict[str, Any], others: Sequence[dict[str, Any]]) -> bool:
    """Whether types or forbidden properties tell that what follows `others` follows `schema`."""
    if not schema.keys() <= {"type", "properties"} or "integer" in as_list(schema.get("type", ())):
        return False
    forbidden = schema.get("properties", {})
    return _types_of_all(others) <= types_of(schema) and all(
        one is False
        and any(
            other.get("properties", {}).get(name, not _is_closed(other)) is False
            for other in others
        )
        for name, one in forbidden.items()
    )


def _is_closed(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _types_of_all(schemas: Sequence[dict[str, Any]]) -> set[str]:
    types = set(TYPES)
    for schema in schemas:
        types &= types_of(schema)
    return types


def of_other_types(names: str | Iterable[str]) -> Schema:
    """Values of none of the types. For "integer" without other numbers, too."""
    found = {"number" if name == "integer" else name for name in as_list(names)}
    others = [name for name in TYPES if name not in found]
    return {"type": others} if others else False


def only_for(name: str, schema: Schema) -> Schema:
    """`schema` for values of a type; others may be anything."""
    return any_of([of_other_types(name), all_of([{"type": name}, schema])])


def has_item(schema: Schema, position: int) -> Schema:
    if schema is False:
        return False
    items = [True] * position + [schema]
    return {"type": "array", "prefixItems": items, "minItems": len(items)}


def without(names: Iterable[str]) -> dict[str, Schema]:
    return {"properties": dict.fromkeys(names, False)}


def with_property(name: str, schema: Schema) -> Schema:
    if schema is False:
        return False
    return {"type": "object", "properties": {name: schema}, "required": [name]}


def with_others(properties: dict[str, Any], schema: Schema) -> Schema:
    """Objects with `properties` of which all others follow `schema`, and there is one."""
    if schema is False:
        return False
    return {"type": "object", **properties, "additionalProperties": schema, "minProperties": 1}


def with_names(pattern: str, schema: Schema) -> Schema:
    """Objects that have nothing but properties with such names, of which each follows `schema`."""
    if schema is False:
        return False
    named = {"patternProperties": {pattern: schema}, "additionalProperties": False}
    return {"type": "object", **named, "minProperties": 1}


def as_list(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
