"""Limits on the fields of a body, by count and by bytes, checked before the body is decoded.

Must not know: requests, routes, what a field means.

The time to decode and check a field is proportional to the number of its values, and it blocks the
event loop.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec

from .errors import invalid

SMALL_BODY = 16 * 2**10  # bytes; smaller bodies are not checked
MAX_OTHER_VALUES = 50_000  # of all fields together that the body's type does not define


class FieldLimit(NamedTuple):
    """Limits of one field of a body, nested values included."""

    max_values: int = 10_000  # list elements and object members
    max_bytes: int | None = 2**20  # size of its JSON; None: limited only by the size of the body


# By the name of a top-level field of any body; other fields have FieldLimit(). A body's own
# `field_limits` come first.
LIMITS = {
    "messages": FieldLimit(50_000, None),
    "input": FieldLimit(50_000, None),
    "system": FieldLimit(50_000, None),
    "instructions": FieldLimit(50_000, None),
    "documents": FieldLimit(50_000, None),
    "tools": FieldLimit(50_000, 4 * 2**20),
    "prompt": FieldLimit(1_000_000, None),
    "tokens": FieldLimit(1_000_000, None),
    "allowed_token_ids": FieldLimit(500_000, 8 * 2**20),
    # each of them is tokenized twice
    "bad_words": FieldLimit(1_024, SMALL_BODY),
    # each of them is searched for in every piece of text
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
    """Whether a JSON text has more than the given number of list elements and object members. An
    empty list or object counts as one.

    The cost per value is no more than that per character.
    """
    if _num_marks(text) <= max_values:
        return False
    if b'"' not in text:
        return True
    # without escapes, each quote begins or ends a string
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * max_values:  # a member has at most two strings
        return True
    return sum(map(_num_marks, plain.split(b'"')[::2])) > max_values


def _num_marks(text: bytes | bytearray) -> int:
    """An upper bound of the number of values; strings that contain such characters increase it."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


@lru_cache(maxsize=256)
def _unread(body_type: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The same fields, each as undecoded JSON."""
    names = [field.encode_name for field in msgspec.structs.fields(body_type)]
    raw = msgspec.Raw | msgspec.UnsetType
    return msgspec.defstruct("Unread", [(name, raw, msgspec.UNSET) for name in names])
