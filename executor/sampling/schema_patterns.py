"""Patterns of the strings that other patterns do not match, or that several match together.

A pattern is a regular expression that is searched for, as the keyword `pattern` of a JSON schema
has it. It becomes an expression over the characters and two marks, of the text's start and of its
end. A text has any number of the latter, so that each $ finds one. The expression becomes a
deterministic automaton by derivatives (Brzozowski, "Derivatives of Regular Expressions", 1964), and
the automaton becomes a pattern by leaving out one state after the other, cheapest first (Delgado
and Morais, "Approximation to the Smallest Regular Expression for a Given Regular Language", 2004).

Must not know: schemas, llguidance's API, requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from re import _constants as sre  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, NamedTuple

MAX_STATES = 150
MAX_NODES = 20_000  # of the expressions of one automaton
MAX_PATTERN = 20_000  # characters
MAX_COPIES = 400  # of what is repeated a fixed number of times
TOO_LARGE = "what follows from a pattern is too large"

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included, sorted and apart

START, END, LAST = 0x110000, 0x110001, 0x10FFFF
ALL: Ranges = ((0, LAST),)
ANYTHING: Ranges = ((0, END),)
LINE_END: Ranges = ((10, 10),)
DIGITS: Ranges = ((48, 57),)
WORDS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACES: Ranges = ((9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680))
SPACES += ((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))
CATEGORIES = {"CATEGORY_DIGIT": DIGITS, "CATEGORY_WORD": WORDS, "CATEGORY_SPACE": SPACES}


class PatternError(ValueError):
    """A pattern has parts that this module does not know, or what follows from it is too large."""


def complement(pattern: str) -> str | None:
    """A pattern of the texts in which `pattern` is not found; None where it is in every text.
    Raises PatternError.
    """
    return common((), [pattern])


def common(patterns: Iterable[str], without: Iterable[str] = ()) -> str | None:
    """A pattern of the texts in which all `patterns` are found and none of `without` is; None where
    there is no such text. Raises PatternError.
    """
    expressions = Expressions()
    found = [expressions.found(pattern) for pattern in patterns]
    found += [expressions.opposite(expressions.found(pattern)) for pattern in without]
    automaton = _automaton(expressions, expressions.all_of(found))
    return _pattern_of(expressions, automaton) if any(automaton.accepts) else None


def are_apart(*patterns: str) -> bool:
    """Whether no text has all patterns; False, too, where this is not known."""
    expressions = Expressions()
    try:
        every = expressions.all_of(map(expressions.found, patterns))
        return not any(_accepts(expressions, node) for node, _ in _states(expressions, every))
    except PatternError:
        return False


def lengths(pattern: str) -> tuple[int, float]:
    """Bounds of the lengths of texts in which a pattern is found, as far as easily told."""
    try:
        parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError):
        return 0, math.inf
    shortest, longest = parsed.getwidth()
    items = list(parsed) or [(None, None)]
    is_whole = items[0] == (sre.AT, sre.AT_BEGINNING) and items[-1] == (sre.AT, sre.AT_END)
    return shortest, longest if is_whole and longest < sre.MAXREPEAT else math.inf


# ---------------------------------------------------------------- expressions


class Node:
    """An expression: `kind` is "set" with ranges, "empty" (only the empty text), "then", "or",
    "and", "not", "many" (none, one or several times), or "loop" (its second part, or its first with
    the loop itself in the place of the third, which is a "hole"). Expressions with the same kind
    and parts are the same object.
    """

    __slots__ = ("kind", "matches_empty", "number", "parts", "size")

    def __init__(self, kind: str, parts: tuple[Any, ...], matches_empty: bool, number: int):
        self.kind, self.parts = kind, parts
        self.matches_empty = matches_empty
        self.number = number  # an order of expressions
        self.size = 1 + sum(part.size for part in parts if isinstance(part, Node))


class Expressions:
    """Makes the expressions of one question. Raises PatternError for more than MAX_NODES."""

    def __init__(self):
        self._made: dict[tuple[str, tuple[Any, ...]], Node] = {}
        self.never, self.empty = self.one_of(()), self._node("empty", (), True)
        self.always = self._node("many", (self.one_of(ANYTHING),), True)

    def _node(self, kind: str, parts: tuple[Any, ...], matches_empty: bool) -> Node:
        node = self._made.get((kind, parts))
        if node is None:
            if len(self._made) == MAX_NODES:
                raise PatternError(TOO_LARGE)
            node = Node(kind, parts, matches_empty, len(self._made))
            self._made[kind, parts] = node
        return node

    def one_of(self, ranges: Ranges) -> Node:
        return self._node("set", ranges, False)

    def then(self, first: Node, second: Node) -> Node:
        if first is self.never or second is self.never:
            return self.never
        if first is self.empty or second is self.empty:
            return second if first is self.empty else first
        if first.kind == "then":  # to the right, so that equal expressions look equal
            return self.then(first.parts[0], self.then(first.parts[1], second))
        return self._node("then", (first, second), first.matches_empty and second.matches_empty)

    def any_of(self, nodes: Iterable[Node]) -> Node:
        kept: dict[Node, None] = {}
        ranges: Ranges = ()
        for node in nodes:
            for part in node.parts if node.kind == "or" else (node,):
                if part is self.always:
                    return part
                if part.kind == "set":
                    ranges = _union(ranges, part.parts)
                else:
                    kept[part] = None
        if ranges:
            kept[self.one_of(ranges)] = None
        if len(kept) < 2:
            return next(iter(kept), self.never)
        parts = tuple(sorted(kept, key=lambda part: part.number))
        return self._node("or", parts, any(part.matches_empty for part in parts))

    def all_of(self, nodes: Iterable[Node]) -> Node:
        kept: dict[Node, None] = {}
        for node in nodes:
            for part in node.parts if node.kind == "and" else (node,):
                if part is self.never:
                    return part
                if part is not self.always:
                    kept[part] = None
        if len(kept) < 2:
            return next(iter(kept), self.always)
        parts = tuple(sorted(kept, key=lambda part: part.number))
        return self._node("and", parts, all(part.matches_empty for part in parts))

    def opposite(self, node: Node) -> Node:
        if node.kind == "not":
            return node.parts[0]
        if node is self.never or node is self.always:
            return self.always if node is self.never else self.never
        return self._node("not", (node,), not node.matches_empty)

    def many(self, node: Node) -> Node:
        if node.kind == "many":
            return node
        if node is self.never or node is self.empty:
            return self.empty
        return self._node("many", (node,), True)

    def hole(self, number: int) -> Node:
        return self._node("hole", (number,), False)

    def loop(self, body: Node, rest: Node, hole: Node) -> Node:
        """body: one that takes a character before the hole."""
        return self._node("loop", (body, rest, hole), rest.matches_empty)

    def filled(self, node: Node, hole: Node, content: Node, known: dict[Node, Node]) -> Node:
        """An expression with another one in the place of a hole."""
        if node is hole or node in known:
            return known.get(node, content)
        kind, parts = node.kind, node.parts
        if kind in ("set", "empty", "hole"):
            return node
        filled = [self.filled(part, hole, content, known) for part in parts]
        if kind == "then":
            made = self.then(*filled)
        elif kind == "many":
            made = self.many(*filled)
        elif kind == "not":
            made = self.opposite(*filled)
        elif kind == "loop":
            made = self.loop(*filled)
        else:
            made = self.any_of(filled) if kind == "or" else self.all_of(filled)
        known[node] = made
        return made

    def found(self, pattern: str) -> Node:
        """The texts in which a pattern is found."""
        whole, start = _Reading(self, pattern).whole(), self.one_of(((START, START),))
        ways = whole.parts if whole.kind == "or" else (whole,)
        at_start = [way for way in ways if way.kind == "then" and way.parts[0] is start]
        others = self.any_of(way for way in ways if way not in at_start)
        return self.any_of([*at_start, self.then(self.always, others)])

    def after(self, node: Node, code: int, known: dict[Node, Node]) -> Node:
        """What must follow after a character. known: the same of other expressions."""
        if node in known:
            return known[node]
        kind, parts = node.kind, node.parts
        if kind == "set":
            made = self.empty if _is_in(code, parts) else self.never
        elif kind == "empty":
            made = self.never
        elif kind == "then":
            first, second = parts
            made = self.then(self.after(first, code, known), second)
            if first.matches_empty:
                made = self.any_of([made, self.after(second, code, known)])
        elif kind == "many":
            made = self.then(self.after(parts[0], code, known), node)
        elif kind == "not":
            made = self.opposite(self.after(parts[0], code, known))
        elif kind == "loop":
            body, rest, hole = parts
            again = self.filled(self.after(body, code, known), hole, node, {})
            made = self.any_of([self.after(rest, code, known), again])
        elif kind == "hole":
            raise PatternError("a grammar cannot say repeat of what may be empty")
        else:
            combine = self.any_of if kind == "or" else self.all_of
            made = combine(self.after(part, code, known) for part in parts)
        known[node] = made
        return made

    def after_end(self, node: Node) -> Node:
        """What must follow after so many marks of the end that one more changes nothing."""
        known: dict[Node, Node] = {}
        for _ in range(MAX_COPIES):
            before, node = node, self.after(node, END, known)
            if node is before:
                return node
        raise PatternError(TOO_LARGE)


def _is_in(code: int, ranges: Ranges) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _union(*many: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(one for ranges in many for one in ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return tuple(found)


def _others(ranges: Ranges) -> Ranges:
    """The characters outside."""
    found, low = [], 0
    for first, last in ranges:
        if low < first:
            found.append((low, first - 1))
        low = last + 1
    return (*found, (low, LAST)) if low <= LAST else tuple(found)


# ---------------------------------------------------------------- from patterns


class _Reading:
    """Makes expressions of what Python's parser of patterns returns."""

    def __init__(self, expressions: Expressions, pattern: str):
        self._make = expressions
        self._pattern = pattern
        self._copies = self._num_holes = 0

    def whole(self) -> Node:
        try:
            parsed = _parser.parse(self._pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise PatternError(f"{self._pattern!r:.80} is not understood: {error}") from None
        if parsed.state.flags & ~re.UNICODE:
            raise self._unknown("flags")
        return self.sequence(list(parsed), self._make.always, "start")

    def sequence(self, items: list[Any], rest: Node, before: str) -> Node:
        """The items one after the other, and then `rest`. before: "start" where nothing, "marked"
        where only the mark of the start, and "text" where anything can come before the items.
        """
        befores = []
        for name, value in items:
            befores.append(before)
            is_start = name is sre.AT and value in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
            before = "marked" if is_start and before != "text" else "text"
        for (name, value), at_start in zip(reversed(items), reversed(befores)):
            rest = self._item(name, value, rest, at_start)
        return rest

    def _item(self, name: Any, value: Any, rest: Node, before: str) -> Node:
        if name is sre.AT:
            return self._mark(value, rest, before)
        if name in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            return self._make.then(self._make.one_of(self._characters(name, value)), rest)
        if name is sre.BRANCH:
            ways = (self.sequence(list(way), rest, before) for way in value[1])
            return self._make.any_of(ways)
        if name is sre.SUBPATTERN and not value[1] and not value[2]:
            return self.sequence(list(value[3]), rest, before)
        if name in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, repeated = value
            return self._repeat(least, most, repeated, rest)
        if name in (sre.ASSERT, sre.ASSERT_NOT) and value[0] == 1:
            ahead = self.sequence(list(value[1]), self._make.always, before)
            is_there = name is sre.ASSERT
            return self._make.all_of([rest, ahead if is_there else self._make.opposite(ahead)])
        raise self._unknown(name)

    def _mark(self, value: Any, rest: Node, before: str) -> Node:
        if value in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING) and before != "text":
            mark = self._make.one_of(((START, START),))
            return self._make.then(mark, rest) if before == "start" else rest
        if value in (sre.AT_END, sre.AT_END_STRING):
            return self._make.then(self._make.one_of(((END, END),)), rest)
        raise self._unknown(value)

    def _repeat(self, least: int, most: Any, items: Any, rest: Node) -> Node:
        make = self._make
        once = self.sequence(list(items), make.empty, "text")
        is_endless = most is sre.MAXREPEAT
        self._copies += max(0, (least if is_endless else most) - 1)
        if self._copies > MAX_COPIES:
            raise self._unknown("repeat")
        if _has_conditions(once):  # which also what follows it must meet
            return self._repeat_conditions(least, most, items, rest)
        if is_endless:
            rest = make.then(make.many(once), rest)
        else:
            optional = make.empty
            for _ in range(most - least):
                optional = make.any_of([make.empty, make.then(once, optional)])
            rest = make.then(optional, rest)
        for _ in range(least):
            rest = make.then(once, rest)
        return rest

    def _repeat_conditions(self, least: int, most: Any, items: Any, rest: Node) -> Node:
        made = rest
        if most is sre.MAXREPEAT:
            if items.getwidth()[0] == 0:
                raise self._unknown("repeat")
            hole = self._make.hole(self._num_holes)
            self._num_holes += 1
            made = self._make.loop(self.sequence(list(items), hole, "text"), rest, hole)
            most = least
        for _ in range(most - least):
            made = self._make.any_of([rest, self.sequence(list(items), made, "text")])
        for _ in range(least):
            made = self.sequence(list(items), made, "text")
        return made

    def _characters(self, name: Any, value: Any) -> Ranges:
        if name is sre.LITERAL:
            return ((value, value),)
        if name is sre.NOT_LITERAL:
            return _others(((value, value),))
        if name is sre.ANY:
            return _others(LINE_END)
        if name is sre.RANGE:
            return (value,)
        if name is sre.CATEGORY:
            found = CATEGORIES.get(str(value).replace("NOT_", ""))
            if found is not None:
                return _others(found) if "NOT_" in str(value) else found
        if name is sre.IN:
            is_negated = value[0][0] is sre.NEGATE
            found = _union(*(self._characters(*one) for one in value[is_negated:]))
            return _others(found) if is_negated else found
        raise self._unknown(name)

    def _unknown(self, name: Any) -> PatternError:
        return PatternError(
            f"a grammar cannot say {str(name).lower()} of the pattern {self._pattern!r:.80}"
        )


def _has_conditions(node: Node) -> bool:
    """Whether a text must follow two expressions, as after a lookahead."""
    if node.kind == "set":
        return False
    if node.kind in ("and", "not", "loop"):
        return True
    return any(_has_conditions(part) for part in node.parts if isinstance(part, Node))


# ---------------------------------------------------------------- automata


class Automaton(NamedTuple):
    edges: list[dict[int, Ranges]]  # of each state, by the next state; the first state is 0
    accepts: list[bool]


def _sets(node: Node) -> Iterator[Ranges]:
    seen, left = set(), [node]
    while left:
        one = left.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.kind == "set":
            yield one.parts
        elif one.kind != "hole":
            left += one.parts


def _states(expressions: Expressions, expression: Node) -> Iterator[tuple[Node, dict[int, Ranges]]]:
    """The states with their edges to the numbers of others, the first one first.

    Raises PatternError for more than MAX_STATES states.
    """
    bounds = {0, LAST + 1}
    sets = list(dict.fromkeys(_sets(expression)))
    for ranges in sets:
        for low, high in ranges:
            bounds |= {low, high + 1}
    starts = sorted(bound for bound in bounds if bound <= LAST)
    spans = list(zip(starts, [*(bound - 1 for bound in starts[1:]), LAST]))
    grouped: dict[tuple[Ranges, ...], list[tuple[int, int]]] = {}
    for low, high in spans:
        key = tuple(one for one in sets if _is_in(low, one))
        grouped.setdefault(key, []).append((low, high))
    # of characters that no part of the expression tells apart; each is a bit of a mask
    classes = list(grouped.values())
    masks: dict[Ranges, int] = {}
    first = expressions.after(expression, START, {})
    numbers, order = {first: 0}, [first]
    caches: list[dict[Node, Node]] = [{} for _ in classes]
    firsts: dict[Node, frozenset[Ranges]] = {}
    for node in order:  # which grows
        blocks = [(1 << len(classes)) - 1]
        for ranges in _first_sets(node, firsts):
            if (inside := masks.get(ranges)) is None:  # of those above, or a union of some
                codes = ((i, spans[0][0]) for i, spans in enumerate(classes))
                inside = sum(1 << i for i, code in codes if _is_in(code, ranges))
                masks[ranges] = inside
            blocks = [part for one in blocks for part in (one & inside, one & ~inside) if part]
        found: dict[int, Ranges] = {}
        for block in blocks:  # one derivative for all characters that the state does not tell apart
            members = [i for i in range(len(classes)) if block >> i & 1]
            target = expressions.after(node, classes[members[0]][0][0], caches[members[0]])
            if target not in numbers:
                if len(order) == MAX_STATES:
                    raise PatternError(TOO_LARGE)
                numbers[target] = len(order)
                order.append(target)
            number = numbers[target]
            codes = tuple(span for i in members for span in classes[i])
            found[number] = _union(found.get(number, ()), codes)
        yield node, found


def _first_sets(node: Node, known: dict[Node, frozenset[Ranges]]) -> frozenset[Ranges]:
    """Those that tell what follows after a character."""
    if node in known:
        return known[node]
    if node.kind == "set":
        found = frozenset((node.parts,))
    elif node.kind == "then":
        parts = node.parts if node.parts[0].matches_empty else node.parts[:1]
        found = frozenset().union(*(_first_sets(part, known) for part in parts))
    else:
        parts = node.parts if node.kind != "hole" else ()
        found = frozenset().union(*(_first_sets(part, known) for part in parts))
    known[node] = found
    return found


def _automaton(expressions: Expressions, expression: Node) -> Automaton:
    """Raises PatternError for more than MAX_STATES states."""
    states = list(_states(expressions, expression))
    accepts = [_accepts(expressions, node) for node, _ in states]
    return Automaton([edges for _, edges in states], accepts)


def _accepts(expressions: Expressions, node: Node) -> bool:
    """Whether a text may end in a state."""
    return expressions.after_end(node).matches_empty


def _smallest(automaton: Automaton) -> Automaton:
    """States that no text tells apart become one (Moore)."""
    block = [int(accepts) for accepts in automaton.accepts]
    while True:
        keys = []
        for state, edges in enumerate(automaton.edges):
            merged: dict[int, Ranges] = {}
            for target, ranges in edges.items():
                merged[block[target]] = _union(merged.get(block[target], ()), ranges)
            keys.append((block[state], tuple(sorted(merged.items()))))
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        new = [numbers[key] for key in keys]
        if len(numbers) == len(set(block)):
            break
        block = new
    edges = [dict(key[1]) for key in numbers]
    renumbered = {old: number for number, (old, _) in enumerate(numbers)}
    edges = [{renumbered[old]: ranges for old, ranges in one.items()} for one in edges]
    accepts = [False] * len(numbers)
    for state, number in enumerate(new):
        accepts[number] = automaton.accepts[state]
    return Automaton(edges, accepts)


# ---------------------------------------------------------------- to patterns


def _pattern_of(make: Expressions, automaton: Automaton) -> str:
    automaton = _smallest(automaton)
    count = len(automaton.edges)
    first, last = count, count + 1
    texts: dict[int, dict[int, Node]] = {state: {} for state in (*range(count), first, last)}
    for state, edges in enumerate(automaton.edges):
        texts[state] = {target: make.one_of(ranges) for target, ranges in edges.items()}
        if automaton.accepts[state]:
            texts[state][last] = make.empty
    texts[first][0] = make.empty
    left = set(range(count))
    while left:
        state = min(left, key=lambda one: _cost(texts, one))
        left.remove(state)
        out = texts.pop(state)
        loop = make.many(out.pop(state, make.never))
        for edges in texts.values():
            if state in edges:
                entry = make.then(edges.pop(state), loop)
                for target, text in out.items():
                    edges[target] = make.any_of(
                        [edges.get(target, make.never), make.then(entry, text)]
                    )
                    if edges[target].size > MAX_PATTERN:
                        raise PatternError(TOO_LARGE)
    text = _text(texts[first].get(last, make.never))
    if len(text) > MAX_PATTERN:
        raise PatternError(TOO_LARGE)
    return f"^(?:{text})$"


def _cost(texts: dict[int, dict[int, Node]], state: int) -> int:
    """How much longer all texts become without a state."""
    out = [text.size for target, text in texts[state].items() if target != state]
    ways = [edges[state].size for one, edges in texts.items() if one != state and state in edges]
    loop = texts[state][state].size if state in texts[state] else 0
    added = sum(ways) * (len(out) - 1) + sum(out) * (len(ways) - 1)
    return added + loop * (len(ways) * len(out) - 1)


def _text(node: Node) -> str:
    if node.kind == "set":
        return _class(node.parts)
    if node.kind == "empty":
        return ""
    if node.kind == "many":
        inner = node.parts[0]
        return f"{_text(inner)}*" if inner.kind == "set" else f"(?:{_text(inner)})*"
    if node.kind == "then":
        return "".join(f"(?:{_text(x)})" if x.kind == "or" else _text(x) for x in node.parts)
    parts = [part for part in node.parts if part.kind != "empty"]
    text = "|".join(map(_text, parts))
    if len(parts) == len(node.parts):
        return text
    return f"{text}?" if len(parts) == 1 and parts[0].kind == "set" else f"(?:{text})?"


def _class(ranges: Ranges) -> str:
    if ranges == ALL:
        return r"[\s\S]"
    negated = _others(ranges)
    sign, shown = ("^", negated) if len(negated) < len(ranges) else ("", ranges)
    if shown == ranges and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character(ranges[0][0])
    spans = (
        _character(low) if low == high else f"{_character(low)}-{_character(high)}"
        for low, high in shown
    )
    return f"[{sign}{''.join(spans)}]"


def _character(code: int) -> str:
    is_plain = chr(code).isascii() and (chr(code).isalnum() or code == 32)
    return chr(code) if is_plain else f"\\U{code:08x}"
