"""Checks of user-supplied values; each raises InvalidParameterError with the name and the range.

Must not know: which parameters there are (params.py), or what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from .errors import InvalidParameterError

INT64_MAX = 2**63 - 1  # the largest integer in a message
MAX_OWNER_LENGTH = 256
OWNER_WEIGHTS = (0.001, 1000.0)  # least and greatest
MAX_DEPTH = 200  # of nested plain data; encoders and decoders would exhaust the stack beyond it


def require(holds: object, parameter: str, problem: str) -> None:
    if not holds:
        raise InvalidParameterError(parameter, problem)


def shown(value: object) -> str:
    """The value as a short text for an error. Never raises: Python refuses to print huge
    integers.

    Takes time in proportion to the value, unless it is text or a list: call it only for an error.
    """
    if isinstance(value, (str, bytes, list)):
        value = value[:100]
    try:
        text = repr(value)
    except Exception as error:  # repr of a user's object
        return f"{type(value).__name__} ({type(error).__name__})"
    return text if len(text) <= 100 else f"{text[:100]}…"


def require_kind(holds: object, parameter: str, kind: str, value: object) -> None:
    """As require, for "must be {kind}, got {value}"."""
    if not holds:
        raise InvalidParameterError(parameter, f"must be {kind}, got {shown(value)}")


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` probably means; None where none is close. What all names begin
    with ("--", "QUIRE_") must be left out: it would make them look alike.
    """
    import difflib  # costs every start a millisecond

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)), None)


def unknown_argument(name: str, known: Iterable[str]) -> str:
    near = closest(name, known)
    return "there is no such argument" + (f"; did you mean {near}?" if near else "")


class NamedArguments(type(msgspec.Struct)):
    """The metaclass of parameters that users write: a name that the class does not have raises
    InvalidParameterError with the nearest that it has. Decoding does not come here.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            known: tuple[str, ...] = cls.__struct_fields__
            for name in kwargs.keys() - set(known):
                raise InvalidParameterError(name, unknown_argument(name, known)) from None
            raise


def is_int(value: object) -> bool:
    """Whether `value` is an integer. Booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_int(parameter: str, value: Any, low: int, high: int, meaning: str = "") -> None:
    """`meaning` explains special values; it follows the range in parentheses."""
    if not (is_int(value) and low <= value <= high):
        top = "2**63 - 1" if high == INT64_MAX else high
        raise InvalidParameterError(
            parameter,
            f"must be an integer between {low} and {top}{meaning and f' ({meaning})'}, got "
            f"{shown(value)}",
        )


def is_finite(value: object) -> bool:
    """Whether `value` is a finite number that a float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def require_owner(name: Any, weight: Any) -> None:
    """Checks `owner` and `owner_weight` of a request."""
    if name == "" and weight == 1.0:  # the defaults
        return
    require_kind(
        isinstance(name, str) and len(name) <= MAX_OWNER_LENGTH,
        "owner",
        f"a string of at most {MAX_OWNER_LENGTH} characters",
        name,
    )
    require_text("owner", name)
    _require_owner_weight(weight)


def _require_owner_weight(weight: Any) -> None:
    low, high = OWNER_WEIGHTS
    in_range = is_finite(weight) and (weight == 0 or low <= weight <= high)
    wanted = f"0 (in the background) or a number between {low} and {high}"
    require_kind(in_range, "owner_weight", wanted, weight)


def require_weight(parameter: str, weight: Any) -> None:
    low, high = OWNER_WEIGHTS
    in_range = is_finite(weight) and low <= weight <= high
    require_kind(in_range, parameter, f"a number between {low} and {high}", weight)


def require_text(parameter: str, value: Any) -> None:
    """Requires a string without lone surrogates, which neither tokenizers nor messages can
    encode.
    """
    require_kind(isinstance(value, str), parameter, "a string", value)
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            parameter,
            f"must be text that UTF-8 can hold; character {error.start} is a lone surrogate",
        ) from None


def require_texts(parameter: str, values: Any, most: int) -> None:
    """Requires a list of at most `most` non-empty strings."""
    require_kind(isinstance(values, list), parameter, "a list of strings", values)
    require(len(values) <= most, parameter, f"must hold at most {most} strings, got {len(values)}")
    for value in values:
        require_text(parameter, value)
        require(value, parameter, "must not hold an empty string")


def require_token_ids(parameter: str, values: Any) -> None:
    """Requires a list of possible token ids. The InputProcessor checks them against the
    vocabulary.
    """
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise InvalidParameterError(
            parameter, f"must be a list of token ids, which are integers, got {shown(values)}"
        )
    for extreme in (min(values, default=0), max(values, default=0)):
        require(
            0 <= extreme < 2**31,
            parameter,
            f"must be token ids, which are between 0 and 2**31 - 1, got {shown(extreme)}",
        )


def require_plain(parameter: str, value: Any) -> None:
    """Requires None, booleans, 64-bit integers, floats, strings, or lists and dicts of these with
    string keys, nested at most MAX_DEPTH deep.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                require_text(parameter, item)
            elif isinstance(item, dict):
                for key in item:
                    require_text(parameter, key)
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif is_int(item):
                require_int(parameter, item, -(2**63), INT64_MAX)
            else:
                plain = item is None or isinstance(item, (bool, float))
                require(
                    plain,
                    parameter,
                    f"must be plain values (None, numbers, strings, lists, dicts), got "
                    f"{type(item).__name__}",
                )
        level = below
    require(not level, parameter, f"must be at most {MAX_DEPTH} levels deep")
