"""A Lark grammar without recursion as a regular expression, which can constrain a JSON string.

Must not know: tools, HTTP.

A grammar inside a JSON string needs every quote and line break escaped. llguidance does that for
the `pattern` of a JSON schema, and has nothing of the kind for a grammar.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

# Grammars of tools import these terminals of Lark's library `common`.
COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LETTER": "[a-zA-Z]",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\r\f]+ | //[^\n]* | \#[^\n]*)
  | (?P<end>\n+)
  | (?P<string>"(?:\\.|[^"\\\n])*"i?)
  | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
  | (?P<range>\.\.)
  | (?P<alias>->[ \t]*\w+)
  | (?P<times>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
  | (?P<directive>%\w+[^\n]*)
  | (?P<name>[?!]?_?[A-Za-z]\w*(?:\.-?\d+)?(?=[ \t]*:) | \w+)
  | (?P<sign>[:|()\[\]?*+])
    """,
    re.VERBOSE,
)
# A grammar has at most this many characters, and so has its expression, in which rules are written
# out where they are used.
MAX_LENGTH = 100_000
Token = tuple[str, str]  # kind, text


class LarkError(ValueError):
    """The grammar is recursive, or uses what has no equivalent in a regular expression."""


def lark_regex(grammar: str) -> str:
    """Returns an expression for the texts of the rule `start`. Raises LarkError."""
    rules = _rules(grammar)
    done: dict[str, str] = {}

    def expression(name: str, above: tuple[str, ...]) -> str:
        if name not in done:
            if name in above:
                raise LarkError(f"the rule {name!r} is recursive")
            if name not in rules:
                raise LarkError(f"there is no rule {name!r}")
            inner = (*above, name)
            done[name] = _RuleReader(rules[name], lambda used: expression(used, inner)).whole()
        return done[name]

    try:
        return expression("start", ())
    except RecursionError:
        raise LarkError("the rules are nested too deeply") from None


def _checked(text: str) -> str:
    if len(text) > MAX_LENGTH:
        raise LarkError("the grammar is too long")
    return text


def _tokens(grammar: str) -> list[Token]:
    _checked(grammar)
    found, place = [], 0
    while place < len(grammar):
        match = TOKEN.match(grammar, place)
        if match is None:
            raise LarkError(f"cannot read {grammar[place : place + 20]!r}")
        place = match.end()
        if match.lastgroup != "skip":
            found.append((match.lastgroup or "", match[0]))
    return found


def _rules(grammar: str) -> dict[str, list[Token]]:
    """Returns the tokens of each rule by its name. A line that begins with | continues the rule."""
    rules: dict[str, list[Token]] = {}
    tokens, rule = _tokens(grammar), None
    for i, (kind, text) in enumerate(tokens):
        following = tokens[i + 1] if i + 1 < len(tokens) else ("end", "")
        if kind == "directive":
            rules |= _imported(text)
        elif kind == "name" and following == ("sign", ":"):
            rule = rules.setdefault(text.lstrip("?!").split(".")[0], [])
        elif kind not in ("end", "alias") and (kind, text) != ("sign", ":"):
            if rule is None:
                raise LarkError(f"{text!r} is outside any rule")
            rule.append((kind, text))
    return rules


def _imported(directive: str) -> dict[str, list[Token]]:
    match = re.fullmatch(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*", directive)
    if match is None or match[1] not in COMMON:
        raise LarkError(f"{directive!r} is not supported")
    return {match[2] or match[1]: [("common", match[1])]}


class _RuleReader:
    """Reads the tokens of one rule. `expression` gives those of the rules that it uses."""

    def __init__(self, tokens: list[Token], expression: Callable[[str], str]):
        self._tokens = tokens
        self._expression = expression
        self._place = 0

    def whole(self) -> str:
        found = self._alternatives()
        if self._place < len(self._tokens):
            raise LarkError(f"{self._tokens[self._place][1]!r} is not expected here")
        return found

    def _next(self, kind: str, *texts: str) -> str | None:
        """Takes the next token if it is of this kind, and one of these texts."""
        if self._place < len(self._tokens):
            found, text = self._tokens[self._place]
            if found == kind and (not texts or text in texts):
                self._place += 1
                return text
        return None

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._next("sign", "|"):
            found.append(self._sequence())
        return _checked(f"(?:{'|'.join(found)})")

    def _sequence(self) -> str:
        found = ""
        while (one := self._one()) is not None:
            if sign := self._next("sign", "?", "*", "+"):
                one = f"(?:{one}){sign}"
            elif times := self._next("times"):
                least, _, most = re.sub(r"[~ \t]", "", times).partition("..")
                one = f"(?:{one}){{{least},{most or least}}}"
            found = _checked(found + one)
        return found

    def _one(self) -> str | None:
        if self._next("sign", "("):
            return self._closed(")")
        if self._next("sign", "["):
            return self._closed("]") + "?"
        if (text := self._next("string")) is not None:
            if not self._next("range"):
                literal = re.escape(_string(text))
                return f"(?i:{literal})" if text.endswith("i") else literal
            first, last = _string(text), _string(self._next("string") or '""')
            if len(first) != 1 or len(last) != 1:
                raise LarkError("a range is between two characters")
            return f"[{re.escape(first)}-{re.escape(last)}]"
        if (text := self._next("regex")) is not None:
            body, _, flags = text[1:].rpartition("/")
            if set(flags) - set("ims") or re.search(r"\(\?<?[=!]", body):
                raise LarkError(f"{text!r} is not supported")
            return f"(?{flags}:{body})"
        if (text := self._next("common")) is not None:
            return f"(?:{COMMON[text]})"
        if (text := self._next("name")) is not None:
            return self._expression(text)
        return None

    def _closed(self, sign: str) -> str:
        found = self._alternatives()
        if not self._next("sign", sign):
            raise LarkError(f"{sign!r} is missing")
        return found


def _string(token: str) -> str:
    return str(ast.literal_eval(token.removesuffix("i")))
