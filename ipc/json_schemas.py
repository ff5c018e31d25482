"""closed_schema: objects without the properties that a JSON schema does not list.

Must not know: grammars, requests, the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import InvalidParameterError

# Keywords with which a schema may allow properties that `properties` does not list.
OPEN_KEYWORDS = frozenset(
    {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "propertyNames",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "if",
    }
)
# Keywords of which each holds a schema, a list of schemas, or schemas by name.
_ONE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_LISTS = ("prefixItems", "anyOf", "oneOf")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
# Schemas that a value must (not) follow besides another one.
_BESIDE = ("allOf", "not", "if", "then", "else", "dependentSchemas", "propertyNames", "contains")
_ALTERNATIVES = ("anyOf", "oneOf")


def closed_schema(schema: Any) -> Any:
    """`schema` with `"additionalProperties": false` in every object that lists properties and does
    not state what else it allows. The argument is not changed.

    A schema that a value follows together with another one, as within `allOf` or beside a `$ref`,
    stays as it is, with all that it refers to: the other one may list further properties.
    Raises InvalidParameterError for one that nests too deeply.
    """
    try:
        return _Closing(schema).closed(schema)
    except RecursionError:
        raise InvalidParameterError("structured_outputs", "the schema nests too deeply") from None


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas right within a schema, without those beside it."""
    for key in _ONE:
        yield schema.get(key)
    for key in _LISTS:
        yield from schema[key] if isinstance(schema.get(key), list) else ()
    for key in _BY_NAME:
        yield from schema[key].values() if isinstance(schema.get(key), dict) else ()


class _Closing:
    def __init__(self, root: Any):
        self._root = root
        self._kept: dict[int, Any] = {}  # by id: what stays as it is
        self._find_kept(root)

    def _find_kept(self, schema: Any) -> None:
        if not isinstance(schema, dict):
            return
        for key in _BESIDE:
            self._keep(schema.get(key))
        ways = [key for key in ("$ref", *_ALTERNATIVES) if key in schema]
        if len(ways) > 1 or schema.keys() & {"properties", "patternProperties", "allOf", "if"}:
            for key in _ALTERNATIVES:
                self._keep(schema.get(key))
            self._keep(self._referred(schema))
        for inner in _inner(schema):
            self._find_kept(inner)

    def _keep(self, node: Any) -> None:
        """`node`, a part of a schema, stays as it is, with all that it refers to."""
        if isinstance(node, list):
            for one in node:
                self._keep(one)
        elif isinstance(node, dict) and id(node) not in self._kept:
            self._kept[id(node)] = node
            for one in node.values():
                self._keep(one)
            self._keep(self._referred(node))

    def _referred(self, schema: dict[str, Any]) -> Any:
        """What `$ref` names; all of the schema if that is no path within it."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return None
        if not reference.startswith("#/"):
            return self._root
        node = self._root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            elif isinstance(node, dict) and name in node:
                node = node[name]
            else:
                return self._root
        return node

    def closed(self, schema: Any) -> Any:
        if not isinstance(schema, dict) or id(schema) in self._kept:
            return schema
        made = dict(schema)
        for key in _ONE:
            if key in made:
                made[key] = self.closed(made[key])
        for key in _LISTS:
            if isinstance(made.get(key), list):
                made[key] = [self.closed(one) for one in made[key]]
        for key in _BY_NAME:
            if isinstance(made.get(key), dict):
                made[key] = {name: self.closed(one) for name, one in made[key].items()}
        if isinstance(schema.get("properties"), dict) and not schema.keys() & OPEN_KEYWORDS:
            made["additionalProperties"] = False
        return made
