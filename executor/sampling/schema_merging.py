"""Merges schemas of which a value must follow all, so that llguidance need not.

No `allOf` is left except for several patterns of one string, and no keyword beside a $ref.

A schema becomes alternatives of one type each. What a property or an item must be is a set of parts
of the original schema; every set becomes one entry of $defs, so that schemas that contain
themselves are merged in finite time, and equal combinations once.

Must not know: keywords that llguidance does not implement, its API, requests.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import deque
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from .schema_combinations import Schema, as_list
from .schema_patterns import PatternError, are_apart, common
from .schema_values import (
    ANNOTATIONS,
    TYPES,
    TooManyError,
    UnsayableError,
    escape,
    has_type,
    is_instance,
    key_of,
    type_of,
)

MAX_ALTERNATIVES = 300  # of one schema
MAX_PAIRS = 40_000  # of alternatives that are merged for one request
MAX_FINDS = 5_000  # of alternatives of parts, which are not kept while an outer part is open
MAX_PATTERNS = 64  # of properties' names in one schema
MAX_SETS = 400  # of properties that one schema has, where their number is limited
MAX_MULTIPLES = 64  # numbers, or spaces between them, that are told one by one
MAX_SHORT = 100  # characters
MAX_ROUNDS = 4  # until it is known which schemas nothing follows

Parts = tuple[int, ...]  # numbers of parts of the original schema, sorted; a value follows all
Alternative = dict[str, Any]  # keywords of one type, with Parts in the place of schemas

ANY: Parts = ()
NEVER: Parts = (0,)
LARGEST = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"))
SMALLEST = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"))
COLLECTED = frozenset(("pattern", "format", "notMultipleOf", "required"))
KEYWORDS = {
    "null": (),
    "boolean": (),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    + ("notMultipleOf",),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties", "required"),
}


def merged(schema: Schema) -> Schema:
    """Returns a schema with the same instances, without `allOf` except for patterns of one string.
    The argument is not changed. schema: one that schema_rewriting.py has made.

    Raises UnsayableError.
    """
    if not isinstance(schema, dict):
        return schema
    never: set[Parts] = set()
    try:
        for _ in range(MAX_ROUNDS):
            merging = _Merging(schema, never)
            made = merging.place(merging.parts_of([schema]))
            defs = merging.reached(made)
            if not merging.found_never:
                if made is False:
                    raise UnsayableError("no value follows the schema")
                kept = {"x-guidance": schema["x-guidance"]} if "x-guidance" in schema else {}
                return {**kept, **({} if made is True else made), "$defs": defs}
            never |= merging.found_never
    except RecursionError:
        raise UnsayableError("the schema nests too deeply") from None
    raise UnsayableError("a grammar cannot say which of its recursive parts nothing follows")


class _OpenError(UnsayableError):
    """What a part allows is asked while it is being found."""

    def __init__(self, number: int):
        super().__init__("whether a value follows a part of the schema depends on the part itself")
        self.number = number


class _Merging:
    def __init__(self, root: dict[str, Any], never: set[Parts]):
        self._root = root
        self._never = never  # known from an earlier round
        self.found_never: set[Parts] = set()  # what was referred to before that was known
        self._nodes: list[Schema] = [False]  # by number
        self._numbers: dict[str, int] = {"false": 0}  # by text
        self._numbers_of: dict[int, int] = {}  # by id of parts of the root
        self._names: dict[Parts, str] = {}
        self._defs: dict[str, Schema] = {}
        self._placing: set[str] = set()  # names of entries that are being made
        self._referred: set[str] = set()  # those of them that something refers to
        self._alternatives: dict[int, list[Alternative]] = {}
        self._open: set[int] = set()  # whose alternatives are being found
        self._same: set[int] = set()  # those of them that the same value must follow
        self._met: set[int] = set()  # those of these that were left out of themselves
        self._pairs = self._finds = 0
        self._apart: dict[tuple[str, ...], bool] = {}

    # ------------------------------------------------------------ parts

    def _number(self, node: Schema) -> int:
        found = self._numbers_of.get(id(node)) if isinstance(node, dict) else None
        if found is None:
            text = json.dumps(node)
            found = self._numbers.setdefault(text, len(self._nodes))
            if found == len(self._nodes):
                self._nodes.append(node)
            if isinstance(node, dict) and node is self._nodes[found]:  # its id lasts
                self._numbers_of[id(node)] = found
        return found

    def parts_of(self, schemas: Iterable[Schema]) -> Parts:
        found: set[int] = set()
        left = deque(schemas)  # in their order, which becomes that of properties
        seen: set[int] = set()
        while left:
            node = left.popleft()
            if node is False:
                return NEVER
            if node is True or not node.keys() - ANNOTATIONS:
                continue
            number = self._number(node)
            if number in seen:
                continue
            seen.add(number)
            if "$ref" in node or "allOf" in node:
                rest = {key: node[key] for key in node if key not in ("$ref", "allOf")}
                named = [self._target(node["$ref"])] if "$ref" in node else []
                left.extendleft(reversed([rest, *named, *node.get("allOf", ())]))
            else:
                found.add(number)
        return tuple(sorted(found))

    def _target(self, reference: str) -> Schema:
        return self._root.get("$defs", {}).get(reference.rsplit("/", 1)[1], False)

    # ------------------------------------------------------------ entries of $defs

    def place(self, parts: Parts) -> Schema:
        """What stands for values that follow all parts: a reference, or a short schema."""
        if parts == NEVER or parts in self._never:
            return False
        if parts == ANY:
            return True
        name = self._names.setdefault(parts, str(len(self._names)))
        reference = {"$ref": f"#/$defs/{name}"}
        if name in self._placing:
            self._referred.add(name)
            return reference
        if name not in self._defs:
            self._placing.add(name)
            try:
                self._defs[name] = self._made(parts)
            finally:
                self._placing.remove(name)
            if self._defs[name] is False and name in self._referred:
                self.found_never.add(parts)
        made = self._defs[name]
        return made if isinstance(made, bool) or _is_short(made) else reference

    def _is_never(self, parts: Parts) -> bool:
        """Whether it is known that nothing follows all parts."""
        try:
            return parts != ANY and self.place(parts) is False
        except _OpenError:
            return False

    def reached(self, schema: Schema) -> dict[str, Schema]:
        """Those of $defs that are referred to, directly or not."""
        found: dict[str, Schema] = {}
        parts_of = {name: parts for parts, name in self._names.items()}
        left = [schema]
        while left:
            node = left.pop()
            if isinstance(node, list):
                left += node
            elif isinstance(node, dict):
                name = str(node.get("$ref", "")).removeprefix("#/$defs/")
                if name in parts_of and name not in found:
                    self.place(parts_of[name])
                    parts_of |= {name: parts for parts, name in self._names.items()}
                    left.append(found.setdefault(name, self._defs[name]))
                left += node.values()
        return found

    def _made(self, parts: Parts) -> Schema:
        made: list[dict[str, Any]] = []
        plain: list[str] = []
        outer, self._same, self._met = (self._same, self._met), set(), set()
        try:
            alternatives = self._all(parts)
        finally:
            self._same, self._met = outer
        for one in alternatives:
            for schema in self._schemas(one):
                if schema.keys() == {"type"}:
                    plain.append(schema["type"])
                elif schema not in made:
                    made.append(schema)
        if set(TYPES) <= set(plain):
            return True
        kinds = set(plain)
        made = [one for one in made if one["type"] not in kinds]
        if plain:
            names = list(dict.fromkeys(plain))
            made.insert(0, {"type": names[0] if len(names) == 1 else names})
        if not made:
            return False
        return made[0] if len(made) == 1 else {"anyOf": made}

    # ------------------------------------------------------------ alternatives

    def _all(self, parts: Parts) -> list[Alternative]:
        """The alternatives of all parts together."""
        if 0 in parts:
            return []
        first, *others = parts or (self._number({}),)
        found = self._of(first)
        for number in others:
            found = self._product(found, self._of(number))
        return found

    def _of(self, number: int) -> list[Alternative]:
        """The alternatives of one part, which has no `allOf` and no $ref."""
        if number in self._alternatives:
            return self._alternatives[number]
        if number in self._open:
            raise _OpenError(number)
        self._open.add(number)
        self._same.add(number)
        try:
            found = self._find(number)
        finally:
            self._open.remove(number)
            self._same.remove(number)
            self._met.discard(number)
        if not self._met:  # otherwise alternatives of an outer part are missing here
            self._alternatives[number] = found
        return found

    def _find(self, number: int) -> list[Alternative]:
        self._finds += 1
        if self._finds > MAX_FINDS:  # k branches that name each other have k! orders
            raise TooManyError
        node = self._nodes[number]
        found = self._plain(node)
        if "anyOf" in node:
            ways = [way for one in node["anyOf"] for way in self._ways(one)]
            keys = node.keys() - ANNOTATIONS - {"anyOf"}
            found = self._product(found, ways) if keys else self._distinct(ways)
        return found

    def _ways(self, branch: Schema) -> list[Alternative]:
        """The alternatives of a branch of `anyOf`. One that a value follows only where it follows
        the whole `anyOf` adds nothing to that.
        """
        try:
            return self._all(self.parts_of([branch]))
        except _OpenError as error:
            if error.number not in self._same:  # another value's, such as the outer object's
                raise
            self._met.add(error.number)
            return []

    def _product(self, some: list[Alternative], others: list[Alternative]) -> list[Alternative]:
        pairs = [(a, b) for a in some for b in others if a["type"] == b["type"]]
        self._pairs += len(pairs)
        if self._pairs > MAX_PAIRS:
            raise TooManyError
        made = (self._both(a, b) for a, b in pairs)
        return self._distinct([one for one in made if one is not None])

    @staticmethod
    def _distinct(alternatives: list[Alternative]) -> list[Alternative]:
        found = {json.dumps(one): one for one in alternatives}
        whole = {one["type"] for one in found.values() if len(one) == 1}
        kept = [one for one in found.values() if len(one) == 1 or one["type"] not in whole]
        if len(kept) > MAX_ALTERNATIVES:
            raise TooManyError
        return kept

    def _plain(self, node: dict[str, Any]) -> list[Alternative]:
        """What a part says itself, for each type."""
        values = [node["const"]] if "const" in node else node.get("enum")
        types = as_list(node.get("type", TYPES))
        found = []
        for name in TYPES:
            if name not in types and not (name == "number" and "integer" in types):
                continue
            one: Alternative = {"type": name}
            if name == "number" and "number" not in types:
                one["integer"] = True
            if values is not None:
                own = {key_of(v): v for v in values if type_of(v) == name and has_type(v, node)}
                one["enum"] = list(own.values())
            for key in KEYWORDS[name]:
                if key in node:
                    value = node[key]
                    if key in COLLECTED and key != "notMultipleOf":
                        value = list(dict.fromkeys(as_list(value)))  # their number is counted
                    one[key] = value
            for side in ("Minimum", "Maximum"):  # booleans in old drafts
                if isinstance(exclusive := one.get(f"exclusive{side}"), bool):
                    del one[f"exclusive{side}"]
                    if exclusive and side.lower() in one:
                        one[f"exclusive{side}"] = one.pop(side.lower())
            if name == "array":
                self._add_items(one, node)
            elif name == "object":
                self._add_properties(one, node)
            if (checked := self._checked(one)) is not None:
                found.append(checked)
        return found

    def _add_items(self, one: Alternative, node: dict[str, Any]) -> None:
        is_old = isinstance(node.get("items"), list)
        first = node["items"] if is_old else node.get("prefixItems", ())
        rest = node.get("additionalItems" if is_old else "items", True)
        if first:
            one["prefixItems"] = [self.parts_of([item]) for item in first]
        if (parts := self.parts_of([rest])) != ANY:
            one["items"] = parts

    def _add_properties(self, one: Alternative, node: dict[str, Any]) -> None:
        patterns = node.get("patternProperties", {})
        if "properties" in node:
            one["properties"] = {
                name: self.parts_of([value, *(patterns[p] for p in patterns if _found(p, name))])
                for name, value in node["properties"].items()
            }
        if patterns:
            one["patternProperties"] = {p: self.parts_of([v]) for p, v in patterns.items()}
        if (parts := self.parts_of([node.get("additionalProperties", True)])) != ANY:
            one["additionalProperties"] = parts

    # ------------------------------------------------------------ two alternatives

    def _both(self, one: Alternative, other: Alternative) -> Alternative | None:
        made = {**one}
        for key, value in other.items():
            if key not in made or key == "type":
                made[key] = value
            elif key in LARGEST or key == "integer":
                made[key] = max(made[key], value)
            elif key in SMALLEST:
                made[key] = min(made[key], value)
            elif key in COLLECTED:
                made[key] = list(dict.fromkeys([*made[key], *value]))
            elif key == "multipleOf":
                made[key] = _number(_common_multiple(_exact(made[key]), _exact(value)))
            elif key == "enum":
                kept = set(map(key_of, value))
                made[key] = [v for v in made[key] if key_of(v) in kept]
            elif key in ("items", "additionalProperties"):
                made[key] = self._union(made[key], value)
        if one["type"] == "array" and ("prefixItems" in one or "prefixItems" in other):
            made["prefixItems"] = [
                self._union(a, b)
                for a, b in itertools.zip_longest(
                    *self._padded(one.get("prefixItems", []), one, other), fillvalue=ANY
                )
            ]
        elif one["type"] == "object":
            self._merge_properties(made, one, other)
        return self._checked(made)

    def _padded(
        self, first: list[Parts], one: Alternative, other: Alternative
    ) -> tuple[list[Parts], list[Parts]]:
        second = other.get("prefixItems", [])
        size = max(len(first), len(second))
        return (
            [*first, *[one.get("items", ANY)] * (size - len(first))],
            [*second, *[other.get("items", ANY)] * (size - len(second))],
        )

    def _union(self, *many: Parts) -> Parts:
        found = tuple(sorted({number for parts in many for number in parts}))
        return NEVER if 0 in found else found

    def _applied(self, one: Alternative, name: str) -> Parts:
        """What an object's property must be."""
        if name in (listed := one.get("properties", {})):
            return listed[name]
        for pattern, parts in one.get("patternProperties", {}).items():
            if _found(pattern, name):
                return parts
        return one.get("additionalProperties", ANY)

    def _merge_properties(self, made: Alternative, one: Alternative, other: Alternative) -> None:
        names = [*one.get("properties", {}), *other.get("properties", {})]
        if names:
            made["properties"] = {
                name: self._union(self._applied(one, name), self._applied(other, name))
                for name in dict.fromkeys(names)
            }
        some, more = one.get("patternProperties", {}), other.get("patternProperties", {})
        if not some and not more:
            return
        regions: dict[str, Parts] = {}
        for pattern, parts in some.items():
            for second, value in more.items():
                both = pattern if pattern == second else _common([pattern, second])
                if both is not None:
                    regions[both] = self._union(parts, value)
        for patterns, others, rest in ((some, more, other), (more, some, one)):
            for pattern, parts in patterns.items():
                touching = [p for p in others if p == pattern or not are_apart(p, pattern)]
                left = _common([pattern], touching) if touching else pattern
                if pattern not in others and left is not None:
                    regions[left] = self._union(parts, rest.get("additionalProperties", ANY))
        if len(regions) > MAX_PATTERNS:
            raise UnsayableError("a grammar cannot say so many patternProperties that overlap")
        made["patternProperties"] = regions

    # ------------------------------------------------------------ one alternative

    def _checked(self, one: Alternative) -> Alternative | None:
        """The alternative, or None where nothing follows it."""
        if "enum" in one:
            one["enum"] = [value for value in one["enum"] if _may_be(value, one)]
            if not one["enum"]:
                return None
        for least, most in (
            ("minLength", "maxLength"),
            ("minItems", "maxItems"),
            ("minProperties", "maxProperties"),
        ):
            if most in one and one.get(least, 0) > one[most]:
                return None
        if one["type"] == "number":
            return one if _has_numbers(one) else None
        if one["type"] == "array":
            return self._checked_array(one)
        return self._checked_object(one) if one["type"] == "object" else one

    def _checked_array(self, one: Alternative) -> Alternative | None:
        first = one.get("prefixItems", [])
        most = one.get("maxItems", math.inf)
        for index, parts in enumerate([*first, one.get("items", ANY)]):
            if index < one.get("minItems", 0) and self._is_never(parts):
                return None
            if parts == NEVER:
                most = min(most, index)
        if most < math.inf:
            one["maxItems"] = most
            if one.get("minItems", 0) > most:
                return None
        return one

    def _checked_object(self, one: Alternative) -> Alternative | None:
        required = one.get("required", ())
        if len(required) > one.get("maxProperties", math.inf):
            return None
        for name in required:
            parts = self._applied(one, name)
            if self._is_never(parts):
                return None
            if parts != ANY:
                one.setdefault("properties", {}).setdefault(name, parts)
        is_closed = one.get("additionalProperties") == NEVER and "patternProperties" not in one
        possible = sum(parts != NEVER for parts in one.get("properties", {}).values())
        return None if is_closed and possible < one.get("minProperties", 0) else one

    # ------------------------------------------------------------ schemas again

    def _schemas(self, one: Alternative) -> list[dict[str, Any]]:
        """Schemas of which any says the alternative."""
        if one["type"] == "number":
            return _numbers(one)
        made = {**one}
        if one["type"] == "string":
            more = []
            if len(one.get("pattern", ())) > 1 and self._are_apart(one["pattern"]):
                return []
            for key in ("pattern", "format"):
                if key in one:
                    made[key], *rest = one[key]
                    more += [{"type": "string", key: value} for value in rest]
            if "enum" in one:  # the patterns are those of all its values, as far as they are read
                made.pop("pattern", None)
                more = [schema for schema in more if "pattern" not in schema]
            return [{**made, **({"allOf": more} if more else {})}]
        if one["type"] == "array":
            most = one.get("maxItems", math.inf)
            first = one.get("prefixItems", [])[: int(min(most, 10**9))]
            placed = [self.place(parts) for parts in first]
            if False in placed:  # what stands before it can be there
                most = placed.index(False)
                if one.get("minItems", 0) > most:
                    return []
                placed, made["maxItems"] = placed[:most], most
            rest = True if most <= len(placed) else self.place(one.get("items", ANY))
            for key in ("prefixItems", "items"):
                made.pop(key, None)
            if placed:
                made["prefixItems"] = placed
            if rest is not True:
                made["items"] = rest
            return [made]
        return self._objects(made) if one["type"] == "object" else [made]

    def _are_apart(self, patterns: list[str]) -> bool:
        """Whether no text has all patterns; False, too, where this is not known."""
        key = tuple(patterns)
        if key not in self._apart:
            self._apart[key] = are_apart(*patterns)
        return self._apart[key]

    def _objects(self, made: dict[str, Any]) -> list[dict[str, Any]]:
        rest = self.place(made.get("additionalProperties", ANY))
        patterns = {p: self.place(parts) for p, parts in self._other_names(made)}
        if rest is False:
            patterns = {p: one for p, one in patterns.items() if one is not False}
        listed = {name: self.place(parts) for name, parts in made.get("properties", {}).items()}
        if any(listed.get(name) is False for name in made.get("required", ())):
            return []
        if rest is False and not patterns:
            listed = {name: one for name, one in listed.items() if one is not False}
            if len(listed) < made.get("minProperties", 0):
                return []
        for key, value, default in (
            ("properties", listed, {}),
            ("patternProperties", patterns, {}),
            ("additionalProperties", rest, True),
        ):
            made.pop(key, None)
            if value != default:
                made[key] = value
        return self._counted(made)

    def _other_names(self, made: dict[str, Any]) -> Iterable[tuple[str, Parts]]:
        """patternProperties without the names of listed properties that llguidance would merge with
        them, which it cannot where references are circular. Here what is listed says all about a
        property.
        """
        listed = made.get("properties", {})
        for pattern, parts in made.get("patternProperties", {}).items():
            names = [
                name
                for name, own in listed.items()
                if own != NEVER and parts != ANY and _found(pattern, name)
            ]
            are_parts = all({*parts} <= {*listed[name]} for name in names)
            left: str | None = pattern
            named = (self._is_named(one) for one in (parts, *(listed[name] for name in names)))
            if names and (not are_parts or any(named)):
                try:
                    left = _common([pattern], [f"^(?:{'|'.join(map(escape, names))})$"])
                except UnsayableError:
                    if not are_parts:
                        raise
            if left is not None:
                yield left, parts

    def _is_named(self, parts: Parts) -> bool:
        made = self.place(parts)
        return isinstance(made, dict) and "$ref" in made

    def _counted(self, made: dict[str, Any]) -> list[dict[str, Any]]:
        """An object schema for each set of optional properties, where their number is limited:
        llguidance counts properties only where all that are listed are required.
        """
        listed, required = made.get("properties", {}), made.get("required", [])
        optional = [name for name in listed if name not in required and listed[name] is not False]
        is_open = made.get("additionalProperties") is not False or "patternProperties" in made
        least = made.get("minProperties", 0) - len(required)
        most = made.get("maxProperties", math.inf) - len(required)
        if least <= 0:
            made.pop("minProperties", None)
        if not is_open and most >= len(optional):
            made.pop("maxProperties", None)
        if not optional or not made.keys() & {"minProperties", "maxProperties"}:
            return [made]
        found = []
        has_most = "maxProperties" in made
        for size in range(0 if is_open else max(0, least), len(optional) + 1):
            for chosen in itertools.combinations(optional, size):
                found.append(self._with_exactly(made, chosen, optional))
                if len(found) > MAX_SETS:
                    raise UnsayableError(
                        f"a grammar cannot say minProperties or maxProperties of {len(optional)} "
                        f"optional properties"
                    )
                if size == least and not has_most:  # there may be more of them
                    found[-1]["properties"] = listed
                if least <= size or not is_open:
                    found[-1].pop("minProperties", None)
                if not is_open:
                    found[-1].pop("maxProperties", None)
            if size == most or (size >= least and not has_most):
                break
        return found

    @staticmethod
    def _with_exactly(
        made: dict[str, Any], chosen: Iterable[str], optional: list[str]
    ) -> dict[str, Any]:
        """An object schema with just these of its optional properties."""
        others = dict.fromkeys(name for name in optional if name not in chosen)
        listed = {
            name: False if name in others else one for name, one in made["properties"].items()
        }
        return {**made, "properties": listed, "required": [*made.get("required", ()), *chosen]}


def _is_short(schema: dict[str, Any]) -> bool:
    """Whether a schema may stand wherever it is needed."""
    has_parts = schema.keys() & {"anyOf", "properties", "patternProperties", "items", "prefixItems"}
    return not has_parts and len(str(schema)) < MAX_SHORT


def _may_be(value: Any, one: Alternative) -> bool:
    if one.get("integer") and value % 1:
        return False
    bounds = ("minimum", "maximum", "minLength", "maxLength")
    plain = {key: one[key] for key in bounds if key in one}
    patterns = ({"pattern": pattern} for pattern in one.get("pattern", ()))
    return all(is_instance(value, schema) is not False for schema in (plain, *patterns))


def _found(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise UnsayableError(f"the pattern {pattern!r:.80} is not understood: {error}") from None


def _common(patterns: list[str], without: Iterable[str] = ()) -> str | None:
    try:
        return common(patterns, without)
    except PatternError as error:
        raise UnsayableError(f"a grammar cannot say a pattern: {error}") from None


# ---------------------------------------------------------------- numbers


def _exact(value: float) -> Fraction:
    return Fraction(str(value))


def _number(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    numerator = math.lcm(one.numerator, other.numerator)
    return Fraction(numerator, math.gcd(one.denominator, other.denominator))


def _bounds(one: Alternative) -> tuple[Fraction | None, bool, Fraction | None, bool]:
    """The least number and whether it is excluded, and the largest in the same way."""
    lows = [(_exact(one[key]), key == "exclusiveMinimum") for key in one if key.endswith("inimum")]
    highs = [(_exact(one[key]), key != "exclusiveMaximum") for key in one if key.endswith("aximum")]
    low, excludes_low = max(lows, default=(None, False))
    high, includes_high = min(highs, default=(None, True))
    return low, excludes_low, high, not includes_high


def _has_numbers(one: Alternative) -> bool:
    low, excludes_low, high, excludes_high = _bounds(one)
    if low is not None and high is not None:
        if low > high or (low == high and (excludes_low or excludes_high)):
            return False
        if step := _step(one):
            first = math.floor(low / step) + 1 if excludes_low else math.ceil(low / step)
            last = math.ceil(high / step) - 1 if excludes_high else math.floor(high / step)
            if first > last:
                return False
    return "notMultipleOf" not in one or bool(_numbers(one))


def _step(one: Alternative) -> Fraction | None:
    """Of which all numbers are multiples."""
    if "multipleOf" in one:
        step = _exact(one["multipleOf"])
        return _common_multiple(step, Fraction(1)) if one.get("integer") else step
    return Fraction(1) if one.get("integer") else None


def _numbers(one: Alternative) -> list[dict[str, Any]]:
    made = {key: value for key, value in one.items() if key not in ("integer", "notMultipleOf")}
    if one.get("integer"):
        made["type"] = "integer"
    if "notMultipleOf" not in one:
        return [made]
    steps = [_exact(step) for step in one["notMultipleOf"]]
    if "enum" in one:
        values = [v for v in one["enum"] if all(_exact(v) % step for step in steps)]
        return [{**made, "enum": values}] if values else []
    low, excludes_low, high, excludes_high = _bounds(one)
    middle = low if low is not None else high if high is not None else Fraction(0)
    step = _step(one)
    if step is not None:
        around = range(
            math.floor(middle / step) - MAX_MULTIPLES, math.ceil(middle / step) + MAX_MULTIPLES
        )
        values = [
            value
            for value in (step * index for index in around)
            if all(value % other for other in steps)
            and (low is None or (value > low if excludes_low else value >= low))
            and (high is None or (value < high if excludes_high else value <= high))
        ]
        return [{"type": made["type"], "enum": list(map(_number, values))}] if values else []
    least = min(steps)
    marks = {
        other * index
        for other in steps
        for index in range(
            math.floor((middle - 4 * least) / other), math.ceil((middle + 4 * least) / other) + 1
        )
    }
    spans = []
    for first, second in itertools.pairwise(sorted(marks)):
        span = {
            "type": "number",
            "exclusiveMinimum": _number(first),
            "exclusiveMaximum": _number(second),
        }
        for key in ("minimum", "maximum"):
            if key in one:
                span[key] = one[key]
        for key, choose in (("exclusiveMinimum", max), ("exclusiveMaximum", min)):
            if key in one:
                span[key] = choose(span[key], one[key])
        if _has_numbers(span):
            spans.append(span)
    return spans
