"""What the draft that a JSON schema names ignores.

Must not know: llguidance's API, requests.
"""

from __future__ import annotations

import re
from typing import Any

from .schema_combinations import Schema
from .schema_values import ANNOTATIONS

_OLD_DRAFT = re.compile(r"https?://json-schema\.org/draft-0[3-7]/")
_SCHEMAS_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependencies")
)
_VALUES = frozenset(("const", "enum", "default", "examples", "example"))


def without_ignored(schema: Schema) -> Schema:
    """A schema without what its draft ignores: in drafts 3 to 7, the keywords beside a $ref. Those
    that hold definitions or no rule stay. The argument is not changed.

    Raises RecursionError for one that nests too deeply.
    """
    is_old = isinstance(schema, dict) and _OLD_DRAFT.match(str(schema.get("$schema")))
    return _without(schema) if is_old else schema


def _without(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = schema.keys()
    if isinstance(schema.get("$ref"), str):
        kept = kept & (ANNOTATIONS | {"$ref"})
    return {key: _within(key, value) for key, value in schema.items() if key in kept}


def _within(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _without(one) for name, one in value.items()}
    return _without(value)
