"""Copies of a message that differ from it in one field, for every field of it and of the structs
inside it, made from the definitions alone.

A new field of a message is in them by existing. Where no value for it is found, `variations` fails
and names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect
from quire.ipc.messages import Array, EngineCoreOutputs
from quire.ipc.params import STRUCTURED_KINDS, PoolingParams, StructuredOutputsParams

# What changes beside a field: one kind of structure takes the place of another.
BESIDE: dict[tuple[type, str], dict[str, Any]] = {
    (StructuredOutputsParams, kind): {"regex": None} for kind in STRUCTURED_KINDS if kind != "regex"
}
REFUSED = {(PoolingParams, "normalize")}  # fields that may not be set
TEXTS = ("embed", "text")  # first a word that a field allows alone
NUMBERS = (1, 0, 2, 3)
FLOATS = (0.5, 1.5)


def values(type_: inspect.Type) -> Iterator[Any]:
    """Yield some values of a type. The first ones are not a default that fields usually have."""
    match type_:
        case inspect.BoolType():
            yield from (True, False)
        case inspect.IntType():
            yield from NUMBERS
        case inspect.FloatType():
            yield from FLOATS
        case inspect.StrType():
            yield from TEXTS
        case inspect.BytesType():
            yield from (b"bytes", b"more")
        case inspect.NoneType():
            yield None
        case inspect.EnumType():
            yield from reversed(type_.cls)
        case inspect.AnyType():
            yield {"a": [1, "b", None]}
        case inspect.ListType():
            yield from ([value] for value in values(type_.item_type))
        case inspect.TupleType():
            of_items = [[*islice(values(item), 2)] for item in type_.item_types]
            yield from (tuple(found[i % len(found)] for found in of_items) for i in range(2))
        case inspect.DictType():
            key = next(values(type_.key_type))
            yield from ({key: value} for value in values(type_.value_type))
        case inspect.UnionType():
            for item in type_.types:
                yield from values(item)
        case inspect.StructType():
            yield from structs(type_)
        case inspect.Metadata():  # of a counter: how it is exposed
            yield from values(type_.type)
        case inspect.CustomType() if type_.cls is Array:
            yield from (Array("f4", (1, 2), bytes(range(n, n + 8))) for n in (1, 2))
        case _:
            raise TypeError(f"message_variations.values has no value for {type_}")


def structs(type_: inspect.StructType) -> Iterator[Any]:
    """Yield structs of this type: a plain one, then one for each variation of it."""
    if type_.cls is StructuredOutputsParams:
        plain = StructuredOutputsParams(regex="a+")  # it must constrain something
    else:
        required = {
            field.name: next(values(field.type)) for field in type_.fields if field.required
        }
        plain = type_.cls(**required)
    yield plain
    yield from (changed for _, changed in variations(plain))


def changes(before: Any, type_: inspect.Type) -> Iterator[Any]:
    """Yield values that a field may have instead of `before`. Columns keep their length."""
    if isinstance(before, list) and len(before) > 1:
        yield list(reversed(before))
    for value in values(type_):
        if isinstance(before, list) and len(before) > 1:
            value = [*value, *before[1:]]
        yield value


def variations(message: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Yield (name, copy) for every field: the copy differs from `message` in that field alone.

    A field that holds a struct has a copy for each field inside it. Fails if a field has no
    valid value but its own.
    """
    for field in inspect.type_info(type(message)).fields:
        before, num_found = getattr(message, field.name), 0
        beside = BESIDE.get((type(message), field.name), {})
        for value in changes(before, field.type):
            if value == before and type(value) is type(before):
                continue
            try:
                changed = msgspec.structs.replace(message, **{field.name: value}, **beside)
            except ValueError:  # InvalidParameterError too: not a value of this field
                continue
            num_found += 1
            yield field.name, changed
            if not holds_struct(field.type):
                break
        assert num_found or (type(message), field.name) in REFUSED, (
            f"no value was found for {type(message).__name__}.{field.name}: extend `values`"
        )


def holds_struct(type_: inspect.Type) -> bool:
    match type_:
        case inspect.StructType():
            return True
        case inspect.UnionType():
            return any(holds_struct(item) for item in type_.types)
        case inspect.ListType():
            return holds_struct(type_.item_type)
    return False


OUTPUTS = EngineCoreOutputs(
    0,
    ["a", "b"],
    [0, 4],
    [2, 1],
    [5, 6, 7],
    step_times=[1.5, 2.5],
    token_steps=[0, 1, 1],
)
