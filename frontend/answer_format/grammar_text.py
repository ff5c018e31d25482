"""GrammarText: writes a grammar in Lark with llguidance's extensions.

Must not know: llguidance itself, answer formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...ipc.json_schemas import OPEN_KEYWORDS

# These are the separators of Python's json.dumps, which most chat templates use.
USUAL_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_SPACING = {"whitespace_flexible": False}
ANY_TEXT = "/(?s:.*)/"


class GrammarText:
    """`added_tokens` (text -> id) are matched as tokens in the marks of a format (`literal`), as
    models are trained, and as characters in what a request states (`text`, `regex`, `json`).

    With `compact_json`, the JSON of `json` and `arguments` has no whitespace.
    """

    def __init__(self, added_tokens: Mapping[str, int], compact_json: bool = False):
        self._added_tokens = added_tokens
        self._spacing = NO_SPACING if compact_json else USUAL_SPACING
        alternatives = "|".join(
            re.escape(token) for token in sorted(added_tokens, key=len, reverse=True)
        )
        self._added_token = re.compile(f"({alternatives})" if alternatives else r"(?!)")
        self._rules: list[str] = []

    def text(self, text: str) -> str:
        """Matches exactly these characters, which may be a request's."""
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

    def literal(self, text: str) -> str:
        """Matches exactly this text of a format, whose marks may be tokens."""
        pieces = [piece for piece in self._added_token.split(text) if piece]
        return " ".join(
            f"<[{self._added_tokens[p]}]>" if p in self._added_tokens else self.text(p)
            for p in pieces
        )

    def rule(self, expression: str, attributes: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def any_of(self, expressions: Iterable[str]) -> str:
        return self.rule(" | ".join(expressions))

    def regex(self, pattern: str) -> str:
        """Matches a text that the whole pattern matches."""
        escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
        return self.rule(f"/{escaped}/".replace("\n", r"\n"))

    def json(self, schema: dict[str, Any]) -> str:
        return f"%json {json.dumps({**schema, 'x-guidance': self._spacing})}"

    def arguments(self, schema: dict[str, Any]) -> str:
        """Matches an object for a function with this schema.

        Properties that the schema does not list are forbidden unless it allows them.
        """
        closed = {} if OPEN_KEYWORDS & schema.keys() else {"additionalProperties": False}
        return self.json({"type": "object", **schema, **closed})

    def text_until(self, end: str) -> str:
        """Matches any text up to and including `end`."""
        found = self._added_token.search(end)
        if found:
            return f"{self.rule(ANY_TEXT)} {self.literal(end[found.start() :])}"
        return self.rule(ANY_TEXT, f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def text_without(self, mark: str) -> str:
        """Matches any text that does not contain `mark`."""
        if self._added_token.search(mark):
            return self.rule(ANY_TEXT)
        name = f"T{len(self._rules)}"
        self._rules.append(
            f"{name}: {ANY_TEXT} & ~/(?s:.*){re.escape(mark).replace('/', chr(92) + '/')}(?s:.*)/"
        )
        return name

    def finished(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])
