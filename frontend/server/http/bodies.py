"""Decodes JSON bodies into Structs: checks the limits of their fields, locates errors, and collects
the names of unknown fields.

Must not know: requests, routes, what a field means.

The time to decode and check a field is proportional to the number of its values, and it blocks the
event loop. So the limits, by count and by bytes, are checked before the body is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, inspect

from .errors import ApiError, invalid, missing

# ---------------------------------------------------------------- limits

SMALL_BODY = 16 * 2**10  # bytes; smaller bodies are not checked
MAX_OTHER_VALUES = 50_000  # of all fields together that the body's type does not define


class FieldLimit(NamedTuple):
    """Limits of one field of a body, nested values included."""

    max_values: int = 10_000  # list elements and object members
    max_bytes: int | None = 2**20  # size of its JSON; None: limited only by the size of the body


# The keys are top-level fields of any body. Other fields have FieldLimit(). A body's own
# `field_limits` come first.
LIMITS = {
    "messages": FieldLimit(50_000, None),
    "input": FieldLimit(50_000, None),
    "system": FieldLimit(50_000, None),
    "instructions": FieldLimit(50_000, None),
    "documents": FieldLimit(50_000, None),
    "tools": FieldLimit(50_000, 4 * 2**20),
    "images": FieldLimit(max_bytes=None),
    "prompt": FieldLimit(1_000_000, None),
    "tokens": FieldLimit(1_000_000, None),
    "allowed_token_ids": FieldLimit(500_000, 8 * 2**20),
    # Each of them is tokenized twice.
    "bad_words": FieldLimit(1_024, SMALL_BODY),
    # Each of them is searched for in every piece of text.
    "stop": FieldLimit(1_024, SMALL_BODY),
    "stop_sequences": FieldLimit(1_024, SMALL_BODY),
}


def check_limits(raw: bytes | bytearray, body_type: type[msgspec.Struct]) -> None:
    """Raises ApiError 400 that names the field that is too large, and msgspec's errors for invalid
    JSON.
    """
    if len(raw) <= SMALL_BODY:
        return
    num_others = _num_marks(raw)
    own: dict[str, FieldLimit] = getattr(body_type, "field_limits", {})
    try:
        fields = msgspec.structs.asdict(msgspec.json.decode(raw, type=_unread(body_type)))
    except RecursionError:
        return  # decoding fails too, and reports the location
    for name, value in fields.items():
        if value is not msgspec.UNSET:
            text = bytes(value)
            num_others -= _num_marks(text)
            _check(name, text, own.get(name) or LIMITS.get(name, FieldLimit()))
    if num_others > MAX_OTHER_VALUES:
        raise invalid(
            None,
            f"The unknown or repeated fields of the body have more than {MAX_OTHER_VALUES} values "
            f"together.",
            "array_above_max_length",
        )


def _check(name: str, text: bytes, limit: FieldLimit) -> None:
    if limit.max_bytes is not None and len(text) > limit.max_bytes:
        problem = f"at most {limit.max_bytes} bytes, got {len(text)}"
        raise invalid(name, f"'{name}' must have {problem}.", "string_above_max_length")
    if len(text) > limit.max_values and exceeds(text, limit.max_values):
        problem = f"at most {limit.max_values} values, nested values included"
        raise invalid(name, f"'{name}' must have {problem}.", "array_above_max_length")


def exceeds(text: bytes, max_values: int) -> bool:
    """Tells whether a JSON text has more than the given number of list elements and object members.
    An empty list or object counts as one.

    The cost per value is no more than that per character.
    """
    if _num_marks(text) <= max_values:
        return False
    if b'"' not in text:
        return True
    # Without escapes, each quote begins or ends a string.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * max_values:  # a member has at most two strings
        return True
    return sum(map(_num_marks, plain.split(b'"')[::2])) > max_values


def _num_marks(text: bytes | bytearray) -> int:
    """Returns an upper bound of the number of values. Strings that contain such characters increase
    it.
    """
    return text.count(b",") + text.count(b"[") + text.count(b"{")


@lru_cache(maxsize=256)
def _unread(body_type: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Returns the same fields, each as undecoded JSON."""
    names = [field.encode_name for field in msgspec.structs.fields(body_type)]
    raw = msgspec.Raw | msgspec.UnsetType
    return msgspec.defstruct("Unread", [(name, raw, msgspec.UNSET) for name in names])


# ---------------------------------------------------------------- decoding

# An error message of msgspec ends with the location. "[...]" is a value of an object whose keys are
# arbitrary.
PLACE = re.compile(r" - at (?P<key>`key[^`]*` in )?`\$\.?(?P<path>[^`]*)`$")
KINDS = {"str": "string"}  # types whose names in msgspec and in JSON differ
Body = TypeVar("Body", bound=msgspec.Struct)


def decode(
    raw: bytes | bytearray, body_type: type[Body], *, find_unknown: bool = True
) -> tuple[Body, list[str]]:
    """Returns the body and the names of its unknown fields. Names of nested fields include their
    path.

    Raises ApiError 400, also for fields that exceed their limits.
    """
    try:
        check_limits(raw, body_type)
        body = msgspec.json.decode(raw, type=body_type)
        return body, _unknown_fields(raw, body_type) if find_unknown else []
    except msgspec.ValidationError as error:
        raise bad_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


def sent_as(kind: type[msgspec.Struct]) -> Meta:
    """Annotates a dict that `checked` checks as `kind`. It keeps the keys in the client's order."""
    [reference], components = msgspec.json.schema_components([kind], ref_template="{name}")

    def written_out(schema: Any) -> Any:
        if isinstance(schema, list):
            return [written_out(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return written_out(components[schema["$ref"]])
        return {key: written_out(item) for key, item in schema.items()}

    return Meta(extra={"sent_as": kind}, extra_json_schema=written_out(reference))


def known_fields(value: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Returns the fields that `kind` has and that are not null, in the client's order."""
    names = kind.__struct_fields__
    return {name: v for name, v in value.items() if v is not None and name in names}


def checked(value: dict[str, Any], kind: type[Body], path: str) -> Body:
    """Raises ApiError 400 that names the field under `path`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = str(error)
        if PLACE.search(problem) is None:
            problem += " - at `$`"
        raise bad_field(problem.replace("`$", f"`$.{path}")) from None


# ---------------------------------------------------------------- errors and their location


def bad_field(problem: str) -> ApiError:
    """Converts a message of msgspec ("Expected `int`, got `str` - at `$.messages[2].content`") to
    an error that names the field.
    """
    place = PLACE.search(problem)
    param = place["path"].split("[...]")[0] if place else ""
    sentence = PLACE.sub("", problem).replace("`", "'")
    if absent := re.search(r"missing required field '(\w+)'", sentence):
        return missing(f"{param}.{absent[1]}" if param else absent[1])
    where = f"Invalid value for '{param}': " if param else "Invalid body: "
    about_key = "of a key: " if place and place["key"] else ""
    message = f"{where}{about_key}{sentence[:1].lower()}{sentence[1:]}."
    return invalid(param or None, message, _code(sentence))


def _code(sentence: str) -> str:
    """Returns OpenAI's error code for a message of msgspec."""
    if sentence.startswith("Invalid"):
        return "invalid_value"
    bound = re.match(r"Expected '(\w+)' (of length )?([<>])", sentence)
    if bound is None:
        return "invalid_value" if "matching regex" in sentence else "invalid_type"
    kind, is_length, direction = bound.groups()
    if is_length:
        kind = KINDS.get(kind, kind)
        is_empty = direction == ">" and sentence.endswith(">= 1")
        return (
            f"empty_{kind}"
            if is_empty
            else f"{kind}_{'below_min' if direction == '>' else 'above_max'}_length"
        )
    number = "integer" if kind == "int" else "decimal"
    return f"{number}_{'below_min' if direction == '>' else 'above_max'}_value"


# ---------------------------------------------------------------- unknown fields


@dataclass(slots=True)
class Shape:
    """The parts of a type that can hold fields: a Struct's fields by name, the Struct for each
    value of a tag, or a list's elements.
    """

    fields: dict[str, Shape | None] | None = None
    elements: Shape | None = None
    tag_field: str = ""
    by_tag: dict[Any, Shape] = field(default_factory=dict)

    def unknown(self, value: Any, path: str) -> Iterator[str]:
        if isinstance(value, list):
            if self.elements is not None:
                for i, element in enumerate(value):
                    yield from self.elements.unknown(element, f"{path}[{i}]")
        elif isinstance(value, dict):
            shape = self.by_tag.get(value.get(self.tag_field)) if self.by_tag else self
            if shape is None or shape.fields is None:
                return
            for name, inner in value.items():
                here = f"{path}.{name}" if path else name
                if name in shape.fields:
                    if (child := shape.fields[name]) is not None:
                        yield from child.unknown(inner, here)
                elif name != self.tag_field:
                    yield here


def _unknown_fields(raw: bytes | bytearray, body_type: type[msgspec.Struct]) -> list[str]:
    """Returns the paths of unknown fields, sorted. Visits only values whose type has fields."""
    fields, unknown = fields_of(body_type), []
    for name, raw_value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
        if name not in fields:
            unknown.append(name)
        elif (shape := fields[name]) is not None:
            unknown += shape.unknown(msgspec.json.decode(raw_value), name)
    return sorted(unknown)


@lru_cache(maxsize=256)
def fields_of(body_type: type[msgspec.Struct]) -> dict[str, Shape | None]:
    shape = _shape(inspect.type_info(body_type))
    assert shape is not None and shape.fields is not None  # those of a Struct
    return shape.fields


def _shape(info: inspect.Type) -> Shape | None:
    """Returns None for a type that cannot hold fields."""
    if isinstance(info, inspect.StructType):
        return Shape({field.encode_name: _shape(field.type) for field in info.fields})
    if isinstance(info, inspect.Metadata):
        kind = (info.extra or {}).get("sent_as")
        return _shape(info.type if kind is None else inspect.type_info(kind))
    if isinstance(info, inspect.ListType):
        elements = _shape(info.item_type)
        return None if elements is None else Shape(elements=elements)
    if isinstance(info, inspect.UnionType):
        return _union_shape(info)
    return None


def _union_shape(info: inspect.UnionType) -> Shape | None:
    """Returns the shape of a union. msgspec can distinguish at most one list, and one Struct or
    several with tags, so all of them fit into one Shape.
    """
    shape = Shape()
    for member in info.types:
        if (inner := _shape(member)) is None:
            continue
        shape.elements = inner.elements or shape.elements
        struct = member.type if isinstance(member, inspect.Metadata) else member
        if isinstance(struct, inspect.StructType):
            if struct.tag_field:
                shape.tag_field, shape.by_tag[struct.tag] = struct.tag_field, inner
            else:
                shape.fields = inner.fields
    return None if shape == Shape() else shape
