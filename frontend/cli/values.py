"""Converts text, and values from YAML, TOML or JSON, to the value of a field: one rule for flags,
environment and files.

Must not know: which fields exist, where a value was written.
"""

from __future__ import annotations

import json
import math
import types
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.params import StructuredOutputsParams
from ..arguments import vllm_arguments
from ..arguments.field_types import describe_type
from ..arguments.quantities import parse_bytes, parse_count

if TYPE_CHECKING:
    from .flags import Flag

SWITCH = {"on": True, "yes": True, "off": False, "no": False}  # in addition to true, false, 1 and 0


def plain_type(annotation: Any) -> Any:
    """Returns X for Annotated[X | None, ...]. Of several alternatives, it takes the last one, which
    is the most general (list[str] for str | list[str]).
    """
    if get_origin(annotation) is Annotated:
        return plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return plain_type([arg for arg in get_args(annotation) if arg is not type(None)][-1])
    return annotation


def from_text(flag: Flag, text: str) -> Any:
    """Converts a value of a command line or an environment variable. Raises ValueError with a
    sentence.
    """
    plain = plain_type(flag.type)
    spelled = vllm_arguments.spelled(flag.name, text)
    if spelled is None:
        return None
    text = spelled
    try:
        if (
            get_origin(plain) is dict
            or (isinstance(plain, type) and issubclass(plain, msgspec.Struct))
            or (get_origin(plain) is list and text.lstrip().startswith("["))
        ):
            value: Any = json.loads(text)
        elif plain == list[str]:
            value = [text]
        elif get_origin(plain) is list:
            value = text.split(",")
        else:
            value = _scalar(flag, text, plain)
        return _checked(flag, value, text, strict=False)
    except (json.JSONDecodeError, RecursionError) as error:
        kind = "list" if get_origin(plain) is list else "object"
        raise ValueError(f"must be a JSON {kind}{_got(flag, text)} ({error})") from None


def from_plain(flag: Flag, value: Any) -> Any:
    """Converts a value of a file. Raises ValueError with a sentence."""
    plain = plain_type(flag.type)
    value = vllm_arguments.spelled(flag.name, value)
    # YAML reads 1e-5 as text; "none" and "4GiB" are texts, too
    if isinstance(value, str) and plain is not str:
        return from_text(flag, value)
    return _checked(flag, value, value, strict=True)


def _scalar(flag: Flag, text: str, plain: Any) -> Any:
    if text.lower() == "none" and plain is not str:
        return None
    if plain is bool:
        return SWITCH.get(text.lower(), text)
    if plain is int and not text.lstrip("+-").isdigit():
        return parse_bytes(text) if flag.name.endswith("_bytes") else parse_count(text)
    return text


def _checked(flag: Flag, value: Any, written: Any, *, strict: bool) -> Any:
    try:
        value = convert_plain(value, flag.type, strict=strict)
    except msgspec.ValidationError:
        raise ValueError(f"must be {wanted(flag.type)}{_got(flag, written)}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite number{_got(flag, written)}")
    if flag.check is not None and value is not None:
        flag.check(value)
    return value


def _got(flag: Flag, written: Any) -> str:
    return "" if flag.is_secret else f", got {written!r}"


def convert_plain(value: Any, annotation: Any, *, strict: bool) -> Any:
    """Converts a JSON value to the value of a field.

    Raises msgspec.ValidationError, or InvalidParameterError from a nested check.
    """
    if plain_type(annotation) is not StructuredOutputsParams or value is None:
        return msgspec.convert(value, annotation, strict=strict, str_keys=True)
    msgspec.convert(value, dict[str, Any])
    if unknown := value.keys() - set(StructuredOutputsParams.__struct_fields__):
        raise InvalidParameterError(
            "structured_outputs",
            f"has no {min(unknown)!r}; it has "
            f"{', '.join(StructuredOutputsParams.__struct_fields__)}",
        )
    return StructuredOutputsParams(**value)


def wanted(annotation: Any) -> str:
    """Describes the type for users who write text."""
    plain = plain_type(annotation)
    spelled_otherwise = {
        bool: "true or false",
        list[int]: "integers separated by commas",
        list[str]: "a list of strings",
        dict[int, float]: 'a JSON object {"token id": number}',
        dict[str, str]: 'a JSON object {"name": "text"}',
        dict[str, Any]: "a JSON object",
        StructuredOutputsParams: 'a JSON object such as {"regex": "[0-9]+"}',
    }
    return spelled_otherwise.get(plain) or describe_type(annotation)


def is_literal(annotation: Any) -> bool:
    return get_origin(plain_type(annotation)) is Literal
