"""Describes the types of fields, for errors and for --help.

Must not know: which fields exist.
"""

from __future__ import annotations

from typing import Any

from msgspec import inspect


def describe_type(declared_type: Any) -> str:
    """Describes a field's type and range, e.g. "an integer, at least 1"."""
    return _describe(inspect.type_info(declared_type))


def _describe(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata():
            return _describe(info.type)
        case inspect.UnionType():
            return ", or ".join(_describe(member) for member in info.types)
        case inspect.LiteralType():
            return "one of " + ", ".join(map(repr, info.values))
        case inspect.IntType() | inspect.FloatType():
            limits = (
                ("at least", info.ge),
                ("more than", info.gt),
                ("at most", info.le),
                ("less than", info.lt),
            )
            words = [f"{word} {limit}" for word, limit in limits if limit is not None]
            return ", ".join(
                ["an integer" if isinstance(info, inspect.IntType) else "a number", *words]
            )
        case inspect.StrType():
            return "a string"
        case inspect.BoolType():
            return "True or False"
        case inspect.NoneType():
            return "None"
        case inspect.DictType(key_type=inspect.LiteralType(values=keys), value_type=value):
            return f"a dict with keys of {', '.join(map(str, keys))}, each {_describe(value)}"
        case inspect.DictType():
            return "a dict with string keys"
        case inspect.ListType():
            return "a list of strings"
        case inspect.StructType(fields=fields):
            return f"a dict with keys of {', '.join(field.name for field in fields)}"
    return "a different type"
