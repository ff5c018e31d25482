"""What the parts of a JSON schema say about single values, and schemas for all other values.

Must not know: references, llguidance's API, requests.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

# of which no two share a value
TYPES: tuple[str, ...] = ("null", "boolean", "number", "string", "array", "object")
ANNOTATIONS = frozenset(
    ("$comment", "$schema", "$id", "id", "$anchor", "$defs", "definitions", "title", "description")
    + ("default", "examples", "example", "deprecated", "readOnly", "writeOnly")
    + ("contentMediaType", "contentEncoding", "x-guidance")
)
# of which llguidance knows how such strings look
OWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
    + ("unknown",)
)

# RFC 3986 without the addresses in brackets, and RFC 3987, which adds letters.
_HEX = "%[0-9A-Fa-f]{2}"
_ASCII, _ALL = "A-Za-z0-9", "A-Za-z0-9\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"


def _uri(letters: str, has_scheme: bool) -> str:
    unreserved = rf"{letters}._~!$&'()*+,;=\-"
    char, no_colon = rf"(?:[{unreserved}:@]|{_HEX})", rf"(?:[{unreserved}@]|{_HEX})"
    host = rf"(?:[{unreserved}]|{_HEX})*"
    authority = rf"//(?:(?:[{unreserved}:]|{_HEX})*@)?{host}(?::[0-9]*)?(?:/{char}*)*"
    rooted = rf"/(?:{char}+(?:/{char}*)*)?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{authority}|{rooted}|{char}+(?:/{char}*)*)?"
    relative = rf"(?:{authority}|{rooted}|{no_colon}+(?:/{char}*)*)?"
    start = absolute if has_scheme else f"(?:{absolute}|{relative})"
    return rf"^{start}(?:\?(?:{char}|[/?])*)?(?:\#(?:{char}|[/?])*)?$"


_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = rf"(?:[A-Za-z0-9_]|{_HEX})+(?:\.(?:[A-Za-z0-9_]|{_HEX})+)*(?::[1-9][0-9]{{0,3}}|\*)?"
FORMAT_PATTERNS = {
    "uri-reference": _uri(_ASCII, has_scheme=False),
    "iri": _uri(_ALL, has_scheme=True),
    "iri-reference": _uri(_ALL, has_scheme=False),
    "uri-template": (  # RFC 6570
        rf"^(?:[^\x00-\x20\"'<>\\^`{{|}}%]|{_HEX}"
        rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$"
    ),
    "json-pointer": f"^{_POINTER}$",  # RFC 6901
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}

# Patterns that every string of a format has, among others: what lacks one is of no such format.
WIDE_PATTERNS = {
    "date-time": r"^\d{4}-\d\d-\d\d[Tt ]\d",
    "time": r"^\d\d:\d\d:\d\d",
    "date": r"^\d{4}-\d\d-\d\d$",
    "duration": "^P",
    "email": "@",
    "hostname": r"^[^\s/:@]*$",
    "ipv4": r"^\d+\.\d+\.\d+\.\d+$",
    "ipv6": ":.*:",
    "uri": r"^[A-Za-z][A-Za-z0-9+.\-]*:",
    "uuid": r"^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-",
}


class UnsayableError(ValueError):
    """A grammar cannot say this part of a schema, or the part is malformed."""


class TooManyError(UnsayableError):
    """What a schema says in other keywords is too large."""

    def __init__(self):
        super().__init__("too many of its parts exclude each other (oneOf, not, if)")


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def types_of(schema: dict[str, Any]) -> set[str]:
    """Those that `type`, `const` and `enum` of a schema allow.

    Raises ValueError for another name.
    """
    values = finite_values(schema)
    if values is not None:
        return {type_of(value) for value in values}
    found = schema.get("type", TYPES)
    found = [found] if isinstance(found, str) else found
    names = {"number" if name == "integer" else name for name in found}
    if not names <= set(TYPES):
        raise ValueError(f"type must be of {TYPES}, not {found}")
    return names


def finite_values(schema: Any) -> list[Any] | None:
    """All instances of a schema that is nothing but a list of values; None for another one."""
    if not isinstance(schema, dict):
        return None
    keys = schema.keys() - ANNOTATIONS
    if not keys <= {"type", "const", "enum", "format"} or "format" in keys:
        return None
    if "const" in keys:
        values = [schema["const"]]
    elif "enum" in keys:
        values = list(schema["enum"])
    elif schema.get("type") == "boolean":
        return [False, True]
    elif schema.get("type") == "null":
        return [None]
    else:
        return None
    return [value for value in values if has_type(value, schema)]


def has_type(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is of a type that a schema names."""
    names = schema.get("type", TYPES)
    names = [names] if isinstance(names, str) else names
    is_integer = type_of(value) == "number" and value % 1 == 0
    return type_of(value) in names or ("integer" in names and is_integer)


def key_of(value: Any) -> str:
    """Equal for equal values. 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    """Without floats that are whole numbers, at any depth."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    return value


def is_instance(value: Any, schema: Any) -> bool | None:
    """Whether a value follows a schema; None where this needs more than a look at the value."""
    if isinstance(schema, bool):
        return schema
    checks = {
        "type": lambda: has_type(value, schema),
        "const": lambda: key_of(value) == key_of(schema["const"]),
        "enum": lambda: key_of(value) in map(key_of, schema["enum"]),
        "pattern": lambda: re.search(schema["pattern"], value) is not None,
        "minLength": lambda: len(value) >= schema["minLength"],
        "maxLength": lambda: len(value) <= schema["maxLength"],
        "minimum": lambda: value >= schema["minimum"],
        "maximum": lambda: value <= schema["maximum"],
        "required": lambda: value.keys() >= set(schema["required"]),
        "properties": lambda: _is_object(value, schema),
        "patternProperties": lambda: _is_object(value, schema),
        "additionalProperties": lambda: _is_object(value, schema),
        "allOf": lambda: _every(is_instance(value, one) for one in schema["allOf"]),
        "anyOf": lambda: _opposite(
            _every(_opposite(is_instance(value, one)) for one in schema["anyOf"])
        ),
        "not": lambda: _opposite(is_instance(value, schema["not"])),
    }
    kinds = {"pattern": "string", "minLength": "string", "maxLength": "string"}
    kinds |= {"minimum": "number", "maximum": "number", "required": "object"}
    kinds |= dict.fromkeys(("properties", "patternProperties", "additionalProperties"), "object")
    keys = schema.keys() - ANNOTATIONS
    if not keys <= checks.keys() or {"exclusiveMinimum", "exclusiveMaximum"} & keys:
        return None
    try:
        return _every(
            checks[key]() for key in keys if kinds.get(key, type_of(value)) == type_of(value)
        )
    except re.error:
        return None


def _every(answers: Iterable[bool | None]) -> bool | None:
    found = set(answers)
    return False if False in found else None if None in found else True


def _opposite(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


def _is_object(value: dict[str, Any], schema: dict[str, Any]) -> bool | None:
    """Whether all properties of an object follow what a schema says about them."""
    listed, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    answers = []
    for name, one in value.items():
        parts = [listed[name]] if name in listed else []
        parts += [part for pattern, part in patterns.items() if re.search(pattern, name)]
        parts = parts or [schema.get("additionalProperties", True)]
        answers += [is_instance(one, part) for part in parts]
    return _every(answers)


def exactly(value: list[Any] | dict[str, Any]) -> dict[str, Any]:
    """A schema of which a list or an object is the only instance, that says so part by part."""
    if isinstance(value, list):
        items = [{"const": one} for one in value]
        return {
            "type": "array",
            "prefixItems": items,
            "minItems": len(items),
            "maxItems": len(items),
        }
    properties = {name: {"const": one} for name, one in value.items()}
    closed = {"properties": properties, "additionalProperties": False}
    return {"type": "object", "required": list(value), **closed}


def none_of(values: Sequence[Any]) -> dict[str, Any]:
    """A schema of all values but these. Where one is a list or an object, without all of them."""
    strings = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if type_of(value) == "number"})
    types = {type_of(value) for value in values}
    ways: list[Any] = [{"type": name} for name in TYPES if name not in types]
    if strings:
        ways.append({"type": "string", "pattern": f"^{_no_string_of(strings)}$"})
    if numbers:
        ways.append({"type": "number", "exclusiveMaximum": numbers[0]})
        ways += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in itertools.pairwise(numbers)
        ]
        ways.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if "boolean" in types:
        ways += [{"const": one} for one in (False, True) if not any(v is one for v in values)]
    return {"anyOf": ways}


def _no_string_of(strings: Iterable[str]) -> str:
    """A regex that matches all strings but these."""
    rests: dict[str, list[str]] = {}
    has_end = False
    for string in strings:
        if string:
            rests.setdefault(string[0], []).append(string[1:])
        else:
            has_end = True
    if not rests:
        return r"[\s\S]+" if has_end else r"[\s\S]*"
    ways = [f"[^{escape(''.join(rests))}][\\s\\S]*"]
    ways += [f"{escape(first)}{_no_string_of(rest)}" for first, rest in rests.items()]
    return f"(?:{'|'.join(ways)}){'' if has_end else '?'}"


def escape(text: str) -> str:
    """A regex that matches exactly this text, also within brackets, in Rust's dialect and ours."""
    return "".join(
        c if c == " " or (c.isascii() and c.isalnum()) else f"\\U{ord(c):08x}" for c in text
    )
