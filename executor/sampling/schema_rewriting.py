"""Says JSON schemas in the keywords that llguidance implements.

Must not know: llguidance's API, tokens, requests.

    dependencies, dependentRequired,     without the property, or with what it needs
    dependentSchemas
    if, then, else                       `if` and `then`, or `else` and not `if`
    oneOf                                each branch, and none of the others
    not                                  the opposite of one of its keywords
    contains                             one of the first items
    uniqueItems                          lists of the few values that an item can have
    propertyNames                        patternProperties, or properties
    format                               a pattern; one that no standard defines says nothing
    pattern                              without lookaheads; its opposite is a pattern, too
    patternProperties                    no two patterns for the same name

An instance of the rewritten schema is always one of the original. The reverse need not hold: a
grammar cannot say all that is no email address, or that some item of a long list has a property.
What is left is then narrower, and where nothing is left, the schema is refused. The rules are those
of draft 2020-12, with `dependencies`, lists of `items` and the booleans of `exclusiveMinimum` and
`exclusiveMaximum` as in older drafts.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from .schema_combinations import (
    Schema,
    all_of,
    any_of,
    are_exclusive,
    as_list,
    has_item,
    of_other_types,
    only_for,
    with_names,
    with_others,
    with_property,
    without,
)
from .schema_patterns import PatternError, are_apart, common, complement
from .schema_values import (
    ANNOTATIONS,
    FORMAT_PATTERNS,
    OWN_FORMATS,
    WIDE_PATTERNS,
    TooManyError,
    UnsayableError,
    escape,
    exactly,
    finite_values,
    is_instance,
    key_of,
    none_of,
    types_of,
)

MAX_SCHEMAS = 4_000  # that one rewritten schema is made of
MAX_LISTS = 1_024  # lists of unique items that are told one by one
MAX_WAYS = 64  # in which a branch of oneOf excludes the others; the shortest are kept
MAX_POSITION = 4  # of the item that a list must have among others

COPIED = frozenset(
    ("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    + ("multipleOf", "minLength", "maxLength", "minItems", "maxItems", "required")
    + ("minProperties", "maxProperties")
)
UNIQUE_ITEMS = frozenset(("type", "items", "minItems", "maxItems", "uniqueItems"))
LEAST_INTEGER = 1_024 - 2**63  # of which llguidance makes a grammar
MAX_PATTERNS = 64  # of properties' names in the place of those that share names
IGNORE = '; {"x-guidance": {"lenient": true}} in the schema ignores what a grammar cannot say'
UNSAYABLE = frozenset(
    ("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef")
)


def rewritten(schema: Schema) -> Schema:
    """Returns a schema without keywords that llguidance does not implement. The argument is not
    changed. Raises what `in_ways` raises.
    """
    return in_ways(schema, MAX_WAYS)[0]


def in_ways(schema: Schema, max_ways: int) -> tuple[Schema, bool]:
    """`rewritten`, and whether there were more than `max_ways` in which a branch of oneOf excludes
    the others; fewer are shorter and narrower.

    Raises TooManyError for one that becomes too large, UnsayableError with a text that names the
    keyword, and ValueError, TypeError, AttributeError or KeyError for a schema whose keywords have
    values of wrong types.
    """
    try:
        rewriting = _Rewriting(schema, max_ways)
        return rewriting.whole(), rewriting.leaves_out
    except RecursionError:
        raise UnsayableError("the schema nests too deeply") from None


class _Rewriting:
    def __init__(self, root: Schema, max_ways: int):
        self._root = root
        self._max_ways = max_ways
        self.leaves_out = False  # whether ways are left out
        self._names: dict[str, str] = {}  # of references, in $defs
        self._defs: dict[str, Schema] = {}
        self._numbers = itertools.count()  # of entries of $defs
        self._open: set[tuple[str, bool]] = set()  # what is being said in the place of a $ref
        self._within: dict[int, str] = {}  # entries of $defs for what is being said, by id
        self._referred: set[str] = set()  # those of them that something refers to
        self._count = 0
        # Kept as long as this object: a process that checks grammars rewrites those of all users.
        self._are_apart = functools.cache(are_apart)

    def whole(self) -> Schema:
        made = self.said(self._root)
        if made is False:
            raise UnsayableError("no value follows the schema")
        if not isinstance(made, dict) or not isinstance(self._root, dict):
            return {}
        kept = {key: self._root[key] for key in ("$schema", "x-guidance") if key in self._root}
        defs = {name: made for name, made in self._defs.items() if made is not False}
        return {**kept, **made, "$defs": defs}

    def _check(self, schema: Schema) -> None:
        if not isinstance(schema, (dict, bool)):
            raise UnsayableError(f"a schema must be an object or a boolean, not {schema!r:.80}")
        if isinstance(schema, dict) and schema is not self._root and "$id" in schema:
            if _references(schema):  # which are relative to it
                raise UnsayableError("a part of the schema has an $id and references")
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise TooManyError

    # ------------------------------------------------------------ what holds

    def said(self, schema: Schema) -> Schema:
        """A schema whose instances are instances of `schema`."""
        if isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"$ref"}:
            return self._reference(schema["$ref"])
        return self._said(schema)

    def _combined(self, schema: Schema) -> Schema:
        """`said`, to be combined with other schemas: no reference at the top."""
        if isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"$ref"}:
            return self._in_place(schema["$ref"], is_opposite=False)
        return self._said(schema, is_combined=True)

    def _said(self, schema: Schema, is_combined: bool = False, is_target: bool = False) -> Schema:
        if not is_target and isinstance(schema, dict) and id(schema) in self._within:
            return self._entry(self._within[id(schema)])  # what it contains of itself
        self._check(schema)
        if isinstance(schema, bool):
            return schema
        is_outer = id(schema) not in self._within
        name = self._within.setdefault(id(schema), str(next(self._numbers)))
        try:
            made = self._said_keywords(schema, is_combined)
        finally:
            if is_outer:
                del self._within[id(schema)]
        if is_outer and name in self._referred:
            self._defs[name] = made
        return made

    def _within_value(self, schema: Schema) -> Schema:
        """`said` of what a part of the value must be, where references are no longer circular."""
        outer, self._open = self._open, set()
        try:
            return self.said(schema)
        finally:
            self._open = outer

    def _entry(self, name: str) -> Schema:
        """A reference to an entry of $defs that is still to be made."""
        self._referred.add(name)
        return {"$ref": f"#/$defs/{name}"}

    def _said_keywords(self, schema: dict[str, Any], is_combined: bool) -> Schema:
        if (values := self._values(schema)) is not None:
            return {"enum": values} if values else False
        is_alone = not is_combined and len(schema.keys() - ANNOTATIONS) == 1
        branch = self.said if is_alone else self._combined
        plain: dict[str, Any] = {}
        beside: list[Schema] = []
        for key, value in schema.items():
            if key in COPIED:
                plain[key] = value
                types = as_list(schema.get("type", ()))
                if key == "minimum" and "integer" in types and "number" not in types:
                    plain[key] = max(value, LEAST_INTEGER)
            elif key == "$ref":
                beside.append(self._in_place(value, is_opposite=False))
            elif key == "properties":
                plain[key] = {name: self._within_value(one) for name, one in value.items()}
            elif key == "patternProperties":
                said = {pattern: self._within_value(one) for pattern, one in value.items()}
                plain[key] = self._apart(said)
            elif key == "allOf":
                beside += [self._combined(one) for one in value]
            elif key == "anyOf":
                beside.append(any_of([branch(one) for one in value]))
            elif key == "prefixItems" or (key == "items" and isinstance(value, list)):
                plain[key] = [self._within_value(one) for one in value]
            elif key in ("items", "additionalItems", "additionalProperties"):
                plain[key] = self._within_value(value)
            elif key == "oneOf":
                beside.append(self._one_of(value, branch))
            elif key in SAID:
                beside.append(SAID[key](self, schema, value))
            elif key in UNSAYABLE:
                raise UnsayableError(f"a grammar cannot say {key}")
        return all_of([plain, *beside])

    def _values(self, schema: dict[str, Any]) -> list[Any] | None:
        """All instances, where a part lists them and a look at each tells whether it is one, or
        the lists of unique items that are told one by one.
        """
        is_plain = schema.keys() - ANNOTATIONS <= UNIQUE_ITEMS and schema.get("type") == "array"
        if is_plain and schema.get("uniqueItems") is True and schema.get("maxItems", 2) > 1:
            return self._unique_lists(schema)
        parts = [self._resolved(one) for one in schema.get("allOf", ())]
        listed = next((v for one in parts if (v := finite_values(one)) is not None), None)
        if listed is None:
            return None
        parts.append({key: value for key, value in schema.items() if key != "allOf"})
        found = [[is_instance(value, part) for part in parts] for value in listed]
        if any(None in answers and False not in answers for answers in found):
            return None
        return [value for value, answers in zip(listed, found) if False not in answers]

    def _format(self, schema: dict[str, Any], name: Any) -> Schema:
        if name in OWN_FORMATS:
            return {"format": name}
        return {"pattern": FORMAT_PATTERNS[name]} if name in FORMAT_PATTERNS else True

    def _pattern(self, schema: dict[str, Any], value: str) -> Schema:
        pattern = self._plain_pattern(value)
        return only_for("string", False) if pattern is None else {"pattern": pattern}

    def _plain_pattern(self, value: str) -> str | None:
        """Without lookaheads, and marks of the start or the end only where those are; None where no
        text has the pattern. What is escaped for nothing is not what Rust takes it for.
        """
        value = re.sub(r"\\(.)", lambda m: m[1] if m[1] in "<>" else m[0], value, flags=re.DOTALL)
        has_lookahead = re.search(r"\(\?[=!]", value) is not None
        plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", value, flags=re.DOTALL)
        if not has_lookahead and "^" not in plain[1:] and "$" not in plain[:-1]:
            return value
        try:
            return self._common([value])
        except UnsayableError:
            if has_lookahead:
                raise
            return value

    def _dependent(self, schema: dict[str, Any], value: dict[str, Any]) -> Schema:
        return all_of(
            only_for("object", any_of([without([name]), all_of([{"required": [name]}, needed])]))
            for name, needed in ((name, self._needed(one)) for name, one in value.items())
        )

    def _needed(self, one: Any) -> Schema:
        """What an object with a property of `dependencies` must be."""
        is_schema = isinstance(one, (dict, bool))
        return self._combined(one) if is_schema else {"required": as_list(one)}

    def _if(self, schema: dict[str, Any], value: Schema) -> Schema:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        if then is True and otherwise is True:
            return True
        return self._any_sayable(
            [
                lambda: all_of([self._combined(value), self._combined(then)]),
                lambda: all_of([self.opposite(value), self._combined(otherwise)]),
            ]
        )

    def _not(self, schema: dict[str, Any], value: Schema) -> Schema:
        return self.opposite(value)

    def _one_of(self, branches: list[Schema], say: Callable[[Schema], Schema]) -> Schema:
        made = []
        for index, branch in enumerate(branches):
            others = branches[:index] + branches[index + 1 :]
            others = [one for one in others if not self._are_disjoint(branch, one)]
            if not others:
                made.append(say(branch))
                continue
            values = finite_values(self._resolved(branch))
            if values is None or (left := self._in_none(values, others)) is None:
                made.append(self._without(self._combined(branch), others))
            else:
                made.append({"enum": left} if left else False)
        return any_of(made)

    def _without(self, schema: Schema, others: list[Schema]) -> Schema:
        """`schema` and the opposites of all others, in at most `max_ways` ways."""
        most = int(self._max_ways ** (1 / max(1, len(others))))
        own = _listed(schema)

        def cost(way: Schema) -> tuple[bool, int]:
            """What takes no property away from the schema comes first, then what is short."""
            is_loss = way.keys() <= {"type", "properties"} and not own.isdisjoint(_listed(way))
            return is_loss and not any(way["properties"].values()), _size(way)

        opposites = []
        for other in others:
            ways = self.opposite(other)
            if isinstance(ways, dict) and ways.keys() == {"anyOf"}:
                branches = ways["anyOf"] if self._max_ways == MAX_WAYS else list(_branches(ways))
                possible = [one for one in branches if all_of([schema, one]) is not False]
                self.leaves_out |= len(possible) > max(1, most)
                ways = any_of(sorted(possible, key=cost)[: max(1, most)])
            opposites.append(ways)
        return all_of([schema, *opposites])

    def _in_none(self, values: list[Any], schemas: list[Schema]) -> list[Any] | None:
        """The values that follow none of the schemas, or None where that is not known."""
        found = [[is_instance(value, self._resolved(one)) for one in schemas] for value in values]
        if any(answer is None for answers in found for answer in answers):
            return None
        return [value for value, answers in zip(values, found) if not any(answers)]

    def _contains(self, schema: dict[str, Any], value: Schema) -> Schema:
        least = schema.get("minContains", 1)
        if "maxContains" in schema or least > 1:
            raise UnsayableError("a grammar cannot say how many items `contains` must find")
        if least == 0:
            return True
        item = self.said(value)
        return any_of([of_other_types("array"), *(has_item(item, i) for i in range(MAX_POSITION))])

    def _unique_items(self, schema: dict[str, Any], value: bool) -> Schema:
        if value is False or schema.get("maxItems", 2) <= 1:
            return True
        found = self._unique_lists(schema)
        return only_for("array", {"enum": found} if found else False)

    def _unique_lists(self, schema: dict[str, Any]) -> list[list[Any]]:
        most, least = schema.get("maxItems"), schema.get("minItems", 0)
        values = finite_values(self._resolved(schema.get("items")))
        if values is None:
            raise UnsayableError(f"a grammar cannot say uniqueItems of any items{IGNORE}")
        values = list({key_of(one): one for one in values}.values())
        lengths = range(least, min(len(values), most or len(values)) + 1)
        for choose in (itertools.permutations, itertools.combinations):
            lists = (list(one) for length in lengths for one in choose(values, length))
            found = list(itertools.islice(lists, MAX_LISTS + 1))
            if len(found) <= MAX_LISTS:
                return found
        raise UnsayableError(f"a grammar cannot say uniqueItems of {len(values)} values{IGNORE}")

    def _property_names(self, schema: dict[str, Any], value: Schema) -> Schema:
        names = self._resolved(value)
        if names is True:
            return True
        if names is False or "string" not in types_of(names):
            return only_for("object", {"additionalProperties": False})
        if (values := finite_values(names)) is not None:
            listed = {one: True for one in values if isinstance(one, str)}
            return only_for("object", {"properties": listed, "additionalProperties": False})
        pattern = self._pattern_of(self.said(names))
        if pattern is None:
            return only_for("object", {"additionalProperties": False})
        if pattern == "":
            return True
        named = {"patternProperties": {pattern: True}, "additionalProperties": False}
        return only_for("object", named)

    def _pattern_of(self, schema: Schema) -> str | None:
        """A pattern of the strings that follow a rewritten schema; None where there are none."""
        if isinstance(schema, bool):
            return "" if schema else None
        if "string" not in types_of(schema):
            return None
        found: list[str | None] = []
        for key, value in schema.items():
            if key in ("const", "enum"):
                texts = [one for one in finite_values(schema) or [] if isinstance(one, str)]
                found.append(f"^(?:{'|'.join(map(escape, texts))})$" if texts else None)
            elif key in ("minLength", "maxLength"):
                low, high = schema.get("minLength", 0), schema.get("maxLength", "")
                found.append(f"^[\\s\\S]{{{low},{high}}}$")
            elif key in ("pattern", "format"):
                found.append(value if key == "pattern" else self._format_pattern(value))
            elif key == "anyOf":
                ways = [one for way in value if (one := self._pattern_of(way)) is not None]
                found.append("|".join(f"(?:{one})" for one in ways) if ways else None)
            elif key == "allOf":
                found += [self._pattern_of(one) for one in value]
            elif key == "$ref":
                raise UnsayableError("a grammar cannot say propertyNames that contain themselves")
        if None in found:
            return None
        patterns = list(dict.fromkeys(one for one in found if one))
        return patterns[0] if len(patterns) == 1 else self._common(patterns)

    def _common(self, patterns: list[str], without: Iterable[str] = ()) -> str | None:
        try:
            return common(patterns, without)
        except PatternError as error:
            raise UnsayableError(f"a grammar cannot say a pattern: {error}") from None

    def _format_pattern(self, name: str) -> str:
        if name not in FORMAT_PATTERNS:
            raise UnsayableError(f"a grammar cannot say propertyNames of format {name}")
        return FORMAT_PATTERNS[name]

    def _apart(self, properties: dict[str, Schema]) -> dict[str, Schema]:
        """patternProperties of which no two have a pattern for the same name."""
        regions: list[tuple[str, Schema]] = []
        for pattern, schema in properties.items():
            rest = self._plain_pattern(pattern)
            for index, (other, one) in enumerate(list(regions)):
                if rest is None or self._are_apart(rest, other):
                    continue
                both = self._common([rest, other])
                if both is None:
                    continue
                regions[index] = both, all_of([one, schema])
                outside, rest = self._common([other], [rest]), self._common([rest], [other])
                if outside is not None:
                    regions.append((outside, one))
            if rest is not None:
                regions.append((rest, schema))
            if len(regions) > MAX_PATTERNS:
                raise UnsayableError("a grammar cannot say so many patternProperties that overlap")
        return dict(regions)

    # ------------------------------------------------------------ what does not hold

    def opposite(self, schema: Schema) -> Schema:
        """A schema whose instances are no instances of `schema`."""
        self._check(schema)
        if isinstance(schema, bool):
            return not schema
        return self._any_sayable(
            lambda key=key, value=value: self._opposite_of(schema, key, value)
            for key, value in schema.items()
        )

    def _opposite_within(self, schema: Schema) -> Schema:
        """The opposite of what a property or an item must be. One that contains itself would be
        combined with itself.
        """
        if any(self._contains_itself(reference) for reference in _references(schema)):
            raise UnsayableError("a grammar cannot say the opposite of what contains itself")
        return self.opposite(schema)

    def _contains_itself(self, reference: str) -> bool:
        found, new = set(), {reference}
        while new:
            found |= new
            new = {one for name in new for one in _references(self._target(name))}
            if reference in new:
                return True
            new -= found
        return False

    def _opposite_of(self, schema: dict[str, Any], key: str, value: Any) -> Schema:
        if key == "$ref":
            return self._in_place(value, is_opposite=True)
        if key in OPPOSITE:
            return OPPOSITE[key](self, schema, value)
        if key in COPIED | UNSAYABLE | SAID.keys() | {"additionalItems"}:
            raise UnsayableError(f"a grammar cannot say the opposite of {key}")
        return False  # it says nothing

    def _not_type(self, schema: dict[str, Any], value: Any) -> Schema:
        return of_other_types(value)

    def _not_values(self, schema: dict[str, Any], values: list[Any]) -> Schema:
        ways = [none_of(values)]
        for name, kind in (("array", list), ("object", dict)):
            if any(isinstance(value, kind) for value in values):
                others = (self.opposite(exactly(one)) for one in values if isinstance(one, kind))
                ways.append(all_of([{"type": name}, *others]))
        return any_of(ways)

    def _not_value(self, schema: dict[str, Any], value: Any) -> Schema:
        return self._not_values(schema, [value])

    def _not_pattern(self, schema: dict[str, Any], value: str) -> Schema:
        try:
            pattern = complement(value)
        except PatternError as error:
            raise UnsayableError(f"a grammar cannot say the opposite of pattern: {error}") from None
        return False if pattern is None else {"type": "string", "pattern": pattern}

    def _not_least(self, schema: dict[str, Any], value: float) -> Schema:
        is_exclusive = schema.get("exclusiveMinimum") is True
        return {"type": "number", "maximum" if is_exclusive else "exclusiveMaximum": value}

    def _not_most(self, schema: dict[str, Any], value: float) -> Schema:
        is_exclusive = schema.get("exclusiveMaximum") is True
        return {"type": "number", "minimum" if is_exclusive else "exclusiveMinimum": value}

    def _not_above(self, schema: dict[str, Any], value: float | bool) -> Schema:
        return False if isinstance(value, bool) else {"type": "number", "maximum": value}

    def _not_below(self, schema: dict[str, Any], value: float | bool) -> Schema:
        return False if isinstance(value, bool) else {"type": "number", "minimum": value}

    def _not_multiple(self, schema: dict[str, Any], value: float) -> Schema:
        return {"type": "number", "notMultipleOf": [value]}  # a keyword of schema_merging.py

    def _not_format(self, schema: dict[str, Any], name: Any) -> Schema:
        if name in WIDE_PATTERNS:
            return self._not_pattern(schema, WIDE_PATTERNS[name])
        return (
            self._not_pattern(schema, FORMAT_PATTERNS[name]) if name in FORMAT_PATTERNS else False
        )

    def _not_if(self, schema: dict[str, Any], condition: Schema) -> Schema:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        return self._any_sayable(
            [
                lambda: all_of([self._combined(condition), self.opposite(then)]),
                lambda: all_of([self.opposite(condition), self.opposite(otherwise)]),
            ]
        )

    def _not_properties(self, schema: dict[str, Any], value: dict[str, Schema]) -> Schema:
        return self._any_sayable(
            lambda name=name, one=one: with_property(name, self._opposite_within(one))
            for name, one in value.items()
        )

    def _not_required(self, schema: dict[str, Any], value: list[str]) -> Schema:
        return any_of({"type": "object", **without([name])} for name in value)

    def _not_additional(self, schema: dict[str, Any], value: Schema) -> Schema:
        if "patternProperties" in schema:
            raise UnsayableError("a grammar cannot say the opposite of patternProperties")
        names = list(schema.get("properties", {}))
        ways = [with_others(without(names), self._opposite_within(value))]
        if value is False and names and set(names) <= set(schema.get("required", ())):
            ways.append({"type": "object", "required": names, "minProperties": len(names) + 1})
        return any_of(ways)

    def _not_patterns(self, schema: dict[str, Any], value: dict[str, Schema]) -> Schema:
        return self._any_sayable(
            lambda pattern=pattern, one=one: with_names(pattern, self._opposite_within(one))
            for pattern, one in value.items()
        )

    def _not_names(self, schema: dict[str, Any], value: Schema) -> Schema:
        names = self.opposite(value)
        values = finite_values(names)
        if values is not None:
            return any_of(with_property(one, True) for one in values if isinstance(one, str))
        pattern = self._pattern_of(names)
        if pattern is None:
            return False
        return with_names(pattern, True) if pattern else with_others({}, True)

    def _not_items(self, schema: dict[str, Any], value: Schema | list[Schema]) -> Schema:
        if isinstance(value, list):
            return self._not_prefix(schema, value)
        first, item = len(schema.get("prefixItems", ())), self._opposite_within(value)
        return any_of(has_item(item, first + i) for i in range(MAX_POSITION))

    def _not_prefix(self, schema: dict[str, Any], value: list[Schema]) -> Schema:
        return self._any_sayable(
            lambda i=i, one=one: has_item(self._opposite_within(one), i)
            for i, one in enumerate(value)
        )

    def _not_contains(self, schema: dict[str, Any], value: Schema) -> Schema:
        if "maxContains" in schema or schema.get("minContains", 1) != 1:
            raise UnsayableError("a grammar cannot say how many items `contains` must not find")
        return {"type": "array", "items": self._opposite_within(value)}

    def _not_dependent(self, schema: dict[str, Any], value: dict[str, Any]) -> Schema:
        return self._any_sayable(
            lambda name=name, one=one: all_of(
                [
                    {"type": "object", "required": [name]},
                    self.opposite(one)
                    if isinstance(one, (dict, bool))
                    else self._not_required({}, as_list(one)),
                ]
            )
            for name, one in value.items()
        )

    def _not_any(self, schema: dict[str, Any], value: list[Schema]) -> Schema:
        return all_of([self.opposite(one) for one in value])

    def _not_all(self, schema: dict[str, Any], value: list[Schema]) -> Schema:
        return self._any_sayable(lambda one=one: self.opposite(one) for one in value)

    def _not_one(self, schema: dict[str, Any], value: list[Schema]) -> Schema:
        two = [
            lambda one=one, other=other: all_of([self._combined(one), self._combined(other)])
            for one, other in itertools.combinations(value, 2)
            if not self._are_disjoint(one, other)
        ]
        return self._any_sayable([lambda: self._not_any(schema, value), *two])

    def _not_not(self, schema: dict[str, Any], value: Schema) -> Schema:
        return self._combined(value)

    def _any_sayable(self, parts: Iterable[Callable[[], Schema]]) -> Schema:
        """Any of what the functions return, without those that cannot be said.

        Raises UnsayableError if none is left.
        """
        made, problem = [], None
        for part in parts:
            try:
                made.append(part())
            except UnsayableError as error:
                problem = error
        found = any_of(made)
        if found is False and problem is not None:
            raise problem
        return found

    # ------------------------------------------------------------ references

    def _reference(self, reference: Any) -> Schema:
        """A reference into the rewritten schema, which has an entry for each part that is named."""
        if reference not in self._names:
            target = self._target(reference)
            name = self._names[reference] = str(next(self._numbers))
            self._defs[name] = True  # until it is known
            try:
                self._defs[name] = self._said(target, is_target=True)
            except UnsayableError:  # what refers to it then refers to nothing, and is refused
                del self._names[reference], self._defs[name]
                raise
        name = self._names[reference]
        return False if self._defs[name] is False else {"$ref": f"#/$defs/{name}"}

    def _in_place(self, reference: Any, is_opposite: bool) -> Schema:
        """What is named, in the place of a reference: llguidance does not combine a reference into
        a schema that contains itself with anything else.
        """
        key = reference, is_opposite
        if key in self._open:
            if is_opposite:
                raise UnsayableError("a grammar cannot say the opposite of what contains itself")
            return self._reference(reference)
        self._open.add(key)
        try:
            target = self._target(reference)
            return (
                self.opposite(target)
                if is_opposite
                else self._said(target, is_combined=True, is_target=True)
            )
        finally:
            self._open.remove(key)

    def _target(self, reference: Any) -> Schema:
        if reference == "#":
            return self._root
        if not isinstance(reference, str) or not reference.startswith("#/"):
            raise UnsayableError(
                f"$ref must name a part of the schema; the engine does not fetch {reference!r:.100}"
            )
        node = self._root
        for part in unquote(reference[2:]).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            elif isinstance(node, dict) and name in node:
                node = node[name]
            else:
                raise UnsayableError(f"$ref names no part of the schema: {reference!r:.100}")
        return node

    def _resolved(self, schema: Schema) -> Schema:
        """What is named by a schema that is only a reference; True for one that says nothing."""
        seen = 0
        while isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"$ref"}:
            schema, seen = self._target(schema["$ref"]), seen + 1
            if seen > MAX_LISTS:
                raise UnsayableError("a $ref names itself")
        if isinstance(schema, dict) and not schema.keys() - ANNOTATIONS:
            return True
        return schema

    def _are_disjoint(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        """Whether types, values and required properties tell that nothing follows both."""
        one, other = self._resolved(one), self._resolved(other)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return one is False or other is False
        if are_exclusive([one, other]):
            return True
        values, others = finite_values(one), finite_values(other)
        if values is not None and others is not None:
            return not set(map(key_of, values)) & set(map(key_of, others))
        for schema, second in ((one, other), (other, one)):
            for branches in (schema[key] for key in ("anyOf", "oneOf") if key in schema):
                if depth <= MAX_POSITION and all(
                    self._are_disjoint(branch, second, depth + 1) for branch in branches
                ):
                    return True
        types = types_of(one) & types_of(other)
        if types == {"string"} and "pattern" in one and "pattern" in other:
            return self._are_apart(one["pattern"], other["pattern"])
        if types != {"object"} or depth > MAX_POSITION:
            return False
        properties, more = one.get("properties", {}), other.get("properties", {})
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        return any(
            self._are_disjoint(properties[name], more[name], depth + 1)
            for name in shared & properties.keys() & more.keys()
        )


def _references(node: Any) -> set[str]:
    """All within a part of a schema."""
    if isinstance(node, list):
        return {one for inner in node for one in _references(inner)}
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
    return own | {one for inner in node.values() for one in _references(inner)}


def _listed(schema: Schema) -> set[str]:
    """The properties that a rewritten schema lists, also where it combines others."""
    if not isinstance(schema, dict):
        return set()
    parts = [*schema.get("allOf", ()), *schema.get("anyOf", ())]
    return set(schema.get("properties", ())).union(*map(_listed, parts))


def _branches(schema: Schema) -> Iterator[Schema]:
    """Those of an `anyOf`, and of what it has within."""
    if isinstance(schema, dict) and schema.keys() == {"anyOf"}:
        for one in schema["anyOf"]:
            yield from _branches(one)
    else:
        yield schema


def _size(schema: Schema) -> int:
    return len(str(schema))


def _fewer(name: str, kind: str) -> Callable[[_Rewriting, dict[str, Any], int], Schema]:
    def say(_: _Rewriting, schema: dict[str, Any], value: int) -> Schema:
        return {"type": kind, name: value - 1} if value > 0 else False

    return say


def _more(name: str, kind: str) -> Callable[[_Rewriting, dict[str, Any], int], Schema]:
    return lambda _, schema, value: {"type": kind, name: value + 1}


# Each is called with the schema and with the keyword's value.
SAID: dict[str, Callable[[_Rewriting, dict[str, Any], Any], Schema]] = {
    "format": _Rewriting._format,
    "pattern": _Rewriting._pattern,
    "dependencies": _Rewriting._dependent,
    "dependentRequired": _Rewriting._dependent,
    "dependentSchemas": _Rewriting._dependent,
    "if": _Rewriting._if,
    "not": _Rewriting._not,
    "contains": _Rewriting._contains,
    "uniqueItems": _Rewriting._unique_items,
    "propertyNames": _Rewriting._property_names,
}
OPPOSITE: dict[str, Callable[[_Rewriting, dict[str, Any], Any], Schema]] = {
    "type": _Rewriting._not_type,
    "enum": _Rewriting._not_values,
    "const": _Rewriting._not_value,
    "minimum": _Rewriting._not_least,
    "maximum": _Rewriting._not_most,
    "exclusiveMinimum": _Rewriting._not_above,
    "exclusiveMaximum": _Rewriting._not_below,
    "multipleOf": _Rewriting._not_multiple,
    "minLength": _fewer("maxLength", "string"),
    "maxLength": _more("minLength", "string"),
    "minItems": _fewer("maxItems", "array"),
    "maxItems": _more("minItems", "array"),
    "minProperties": _fewer("maxProperties", "object"),
    "maxProperties": _more("minProperties", "object"),
    "pattern": _Rewriting._not_pattern,
    "format": _Rewriting._not_format,
    "if": _Rewriting._not_if,
    "properties": _Rewriting._not_properties,
    "required": _Rewriting._not_required,
    "additionalProperties": _Rewriting._not_additional,
    "patternProperties": _Rewriting._not_patterns,
    "propertyNames": _Rewriting._not_names,
    "items": _Rewriting._not_items,
    "prefixItems": _Rewriting._not_prefix,
    "contains": _Rewriting._not_contains,
    "dependencies": _Rewriting._not_dependent,
    "dependentRequired": _Rewriting._not_dependent,
    "dependentSchemas": _Rewriting._not_dependent,
    "anyOf": _Rewriting._not_any,
    "allOf": _Rewriting._not_all,
    "oneOf": _Rewriting._not_one,
    "not": _Rewriting._not_not,
}
