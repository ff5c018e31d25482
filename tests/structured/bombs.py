"""Grammars that are small to send but expensive to compile, match or store, as a hostile or
careless client could send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def chain(link: Callable[[int], Any], last: Any, length: int) -> dict[str, Any]:
    """A schema that refers to a0, which refers to a1, and so on."""
    return {
        "$ref": "#/$defs/a0",
        "$defs": {**{f"a{i}": link(i + 1) for i in range(length)}, f"a{length}": last},
    }


def ref(i: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/a{i}"}


def rules(body: Callable[[int], str], last: str, count: int, name: str = "r") -> str:
    """A Lark grammar whose rule i is made of rule i + 1."""
    return "\n".join(
        [
            f"start: {name}0",
            *(f"{name}{i}: {body(i + 1)}" for i in range(count)),
            f"{name}{count}: {last}",
        ]
    )


def nested(depth: int, before: str, inside: str, after: str) -> str:
    return before * depth + inside + after * depth


def regexes() -> dict[str, str]:
    return {
        "nested counts": "(a{1,1000}){1,1000}",
        "thrice nested counts": "((a{1,100}){1,100}){1,100}",
        "a large count": "a{1,100000}",
        "an exact large count": "a{100000}",
        "a count of a million": "[a-z]{0,1000000}",
        "stars of stars": "((((a*)*)*)*)*b",
        "an exponential automaton": "(a|b)*a(a|b){5000}",
        "overlapping repeats": "(.*a.{400})+",
        "words and blanks": "(\\w{1,500}\\s?){1,500}\\d{500}",
        "many suffixes": "(" + "|".join(f".*{c}.{{30}}" for c in "abcdefghij") + "){30}",
        "ten thousand brackets": nested(10_000, "(", "a", ")"),
        "half a megabyte of letters": "a" * 500_000,
        "a megabyte of letters": "a" * 1_000_000,
        "forty thousand alternatives": "|".join(
            f"word{i * 7919 % 1_000_003}" for i in range(40_000)
        ),
        "unicode classes": "(\\p{L}\\p{M}*){1,2000}",
        "ten thousand options": "a?" * 10_000 + "b",
        "a hundred thousand options": "a?" * 100_000 + "b",
    }


def choices() -> dict[str, list[str]]:
    return {
        "a hundred thousand choices": [f"choice number {i}" for i in range(100_000)],
        "twenty thousand choices": [f"choice number {i}" for i in range(20_000)],
        "a choice of a megabyte": ["x" * 1_000_000, "y"],
        "prefixes of each other": ["a" * i for i in range(1, 900)],
    }


def schemas() -> dict[str, Any]:
    def objects(count: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {f"property_{i}": {"type": "string"} for i in range(count)},
        }

    return {
        "an enum of a hundred thousand": {"enum": [f"value {i}" for i in range(100_000)]},
        "an enum of thirty thousand": {"enum": [f"value {i}" for i in range(30_000)]},
        "an enum of numbers": {"enum": list(range(60_000))},
        "ten thousand properties": objects(10_000),
        "two thousand required properties": {
            **objects(2000),
            "required": [f"property_{i}" for i in range(2000)],
        },
        "a title of a megabyte": {"type": "string", "title": "x" * 1_000_000},
        "an allOf of a megabyte": {
            "allOf": [{"properties": {f"p{i}": {"type": "integer"}}} for i in range(25_000)]
        },
        "allOf of anyOfs": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "null"}}} for j in range(10)]}
                for i in range(12)
            ]
        },
        "two thousand overlapping oneOfs": {
            "oneOf": [{"properties": {"a": {"const": i}}} for i in range(2000)]
        },
        "a recursive tree": {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {"properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}
            },
        },
        "itself": {"$ref": "#"},
        "a circle": chain(ref, ref(0), 1),
        "doubling arrays": chain(
            lambda i: {"type": "array", "prefixItems": [ref(i)] * 2, "minItems": 2},
            {"type": "null"},
            40,
        ),
        "doubling allOfs": chain(
            lambda i: {"allOf": [ref(i)] * 2}, {"type": "string", "minLength": 2}, 40
        ),
        "doubling anyOfs": chain(
            lambda i: {"anyOf": [ref(i)] * 2}, {"type": "string", "minLength": 2}, 40
        ),
        "a chain of five thousand arrays": chain(
            lambda i: {"type": "array", "prefixItems": [ref(i)], "minItems": 1},
            {"type": "null"},
            5000,
        ),
        "a chain of five thousand anyOfs": chain(
            lambda i: {"anyOf": [{"const": i}, ref(i)]}, {"type": "null"}, 5000
        ),
        "ten thousand objects deep": nested(10_000, '{"properties":{"a":', "{}", "}}"),
        "a hundred objects deep": nested(
            100, '{"type":"object","required":["a"],"properties":{"a":', "{}", "}}"
        ),
        "ten thousand brackets of JSON": "[" * 10_000,
        "patterns of properties": {
            "patternProperties": {f"^(a|b)*{c}(a|b){{30}}$": {"type": "integer"} for c in "abcdef"}
        },
        "a thousand patterns of properties": {
            "patternProperties": {f"^x{i}.*": {"type": "integer"} for i in range(1000)}
        },
        "a billion items at least": {
            "type": "array",
            "minItems": 10**9,
            "items": {"type": "integer"},
        },
        "a million items at most": {
            "type": "array",
            "maxItems": 10**6,
            "items": {"type": "object"},
        },
        "a billion letters at least": {"type": "string", "minLength": 10**9},
        "a billion letters at most": {"type": "string", "maxLength": 10**9},
        "a pattern of nested counts": {
            "type": "string",
            "pattern": "^(([a-z]{1,100}){1,100}){1,100}$",
        },
        "a multiple of a large prime": {"type": "integer", "multipleOf": 999_999_937},
        "a multiple of four primes": {
            "allOf": [
                {"type": "integer", "multipleOf": p} for p in (999_983, 999_979, 999_961, 999_959)
            ]
        },
        "a huge range": {"type": "number", "minimum": -1.23456789e300, "maximum": 1.23456789e300},
    }


def grammars() -> dict[str, str]:
    return {
        "left recursion": 'start: start start | start "a" | "a"',
        "a circle of rules": "start: a\na: b\nb: a",
        "an ambiguous rule": 'start: x\nx: x x x | x x | "a" | ""',
        "five thousand brackets of Lark": "start: " + nested(5000, "(", '"a"', ")"),
        "two to the sixtieth": rules(lambda i: f"r{i} r{i}", '"a"', 60),
        "ambiguous doubling": rules(lambda i: f'r{i} | r{i} "x" | r{i} r{i}', '"a"', 200),
        "a chain of five thousand rules": rules(lambda i: f"r{i}", '"a"', 5000),
        "a chain of three thousand terminals": rules(lambda i: f'"x" R{i}', '"a"', 3000, "R"),
        "a large repeat": 'start: ("a" | "b"){1,100000}',
        "nested repeats": 'start: ((("a"{1,1000}){1,1000}){1,1000}){1,1000}',
        "a circle of terminals": 'start: A\nA: B "x"\nB: A "y"',
        "a hundred intersections": "start: T\nT: " + " & ".join(f"/.*a{i}.*/" for i in range(100)),
        "complements": "start: T\nT: /(a|b)*a(a|b){20}/ & /(a|b)*b(a|b){21}/ & ~/(a|b)*a(a|b){22}/",
        "ten thousand words": "start: " + " | ".join(f'"word{i}"' for i in range(10_000)),
        "a megabyte of words": "start: " + " | ".join(f'"word{i}"' for i in range(80_000)),
    }


def bombs() -> dict[str, dict[str, Any]]:
    """Name -> arguments of StructuredOutputsParams."""
    kinds = {"regex": regexes(), "choice": choices(), "json": schemas(), "grammar": grammars()}
    return {name: {kind: value} for kind, named in kinds.items() for name, value in named.items()}
