"""Reads query parameters: the only place that turns their text into numbers.

Must not know: routes, what a parameter means.

`int` and `str.isdigit` accept digits of every script, and `int` fails on long texts; a query has
ASCII digits, and few.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from .errors import invalid

QueryReader = Callable[[str, list[str]], Any]  # (name, values) -> value; raises ApiError
INTEGER = re.compile(r"-?[0-9]{1,19}")
SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")


def integer(request: Request, name: str, *, default: int, least: int, most: int) -> int:
    """Reads a parameter from `least` to `most`, or its default. Raises ApiError 400 for others."""
    text = request.query_params.get(name, str(default))
    if INTEGER.fullmatch(text) and least <= int(text) <= most:
        return int(text)
    raise invalid(name, f"'{name}' must be an integer from {least} to {most}, got {text!r:.40}.")


def flag(name: str, values: list[str]) -> bool:
    value = values[-1].lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid(name, f"'{name}' must be true or false, got {values[-1]!r:.40}.")
    return value in ("true", "1")


def seconds(name: str, values: list[str]) -> float:
    if not SECONDS.fullmatch(values[-1]):
        raise invalid(name, f"'{name}' must be a number of seconds, got {values[-1]!r:.40}.")
    return float(values[-1])


def one_of(*choices: str) -> QueryReader:
    def read(name: str, values: list[str]) -> str:
        return some_of(*choices)(name, values)[-1]

    return read


def some_of(*choices: str) -> QueryReader:
    def read(name: str, values: list[str]) -> list[str]:
        for value in values:
            if value not in choices:
                raise invalid(name, f"'{name}' must be {' or '.join(choices)}, got {value!r:.40}.")
        return values

    return read


def read_query(request: Request, readers: dict[str, QueryReader]) -> dict[str, Any]:
    """Returns the values of the query parameters that were sent.

    Raises ApiError 400 for an invalid value and for a name that is not in `readers`.
    """
    query = request.query_params
    for name in query:
        if name not in readers:
            known = ", ".join(readers) or "none"
            raise invalid(
                name,
                f"Unknown query parameter {name!r:.40}; this route has: {known}.",
                "unknown_parameter",
            )
    return {name: readers[name](name, query.getlist(name)) for name in query}
