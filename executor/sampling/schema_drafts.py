"""What the draft that a JSON schema names ignores.

Must not know: llguidance's API, requests.
"""

from __future__ import annotations

import re
from typing import Any

from .schema_combinations import Schema
from .schema_values import ANNOTATIONS

_OLD_DRAFT = re.compile(r"https?://json-schema\.org/draft-0([3-7])/")
_FIRST_WITH_IDS = 6  # of the drafts; "id" was its name before
_SCHEMAS_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependencies")
)
_VALUES = frozenset(("const", "enum", "default", "examples", "example"))


def without_ignored(schema: Schema) -> Schema:
    """A schema without what its draft ignores: in drafts 3 to 7, the keywords beside a $ref; in 3
    and 4, $id. Keywords that hold definitions or no rule stay. The argument is not changed.

    Raises RecursionError for one that nests too deeply.
    """
    old = _OLD_DRAFT.match(str(schema.get("$schema"))) if isinstance(schema, dict) else None
    return _without(schema, int(old[1]) >= _FIRST_WITH_IDS) if old else schema


def _without(schema: Any, has_ids: bool) -> Any:
    if isinstance(schema, list):
        return [_without(one, has_ids) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = schema.keys()
    if isinstance(schema.get("$ref"), str):
        kept = kept & (ANNOTATIONS | {"$ref"}) - {"$id"}
    if not has_ids:
        kept = kept - {"$id"}
    return {key: _within(key, value, has_ids) for key, value in schema.items() if key in kept}


def _within(key: str, value: Any, has_ids: bool) -> Any:
    if key in _VALUES:
        return value
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _without(one, has_ids) for name, one in value.items()}
    return _without(value, has_ids)
