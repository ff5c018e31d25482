"""What a suite asks a server, and how an answer is judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Call = dict[str, Any]  # {name of a function: its arguments}


class NoData(Exception):
    """A suite's package or data is missing; says which."""


@dataclass(frozen=True)
class Answer:
    """The first choice of an answer. `calls`: None where an argument is no JSON object."""

    text: str
    calls: tuple[Call, ...] | None
    num_tokens: int
    finish_reason: str

    @classmethod
    def of(cls, body: dict[str, Any]) -> Answer:
        """Read an answer of CHAT or COMPLETIONS."""
        choice = body["choices"][0]
        message = choice.get("message", {"content": choice.get("text")})
        calls = calls_of(message.get("tool_calls") or [])
        num_tokens = body["usage"]["completion_tokens"]
        return cls(message["content"] or "", calls, num_tokens, choice["finish_reason"])


def calls_of(tool_calls: list[dict[str, Any]]) -> tuple[Call, ...] | None:
    """Return the calls with decoded arguments, or None if a server wrote what is no object."""
    found = []
    for call in tool_calls:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except json.JSONDecodeError:
            return None
        if not isinstance(arguments, dict):
            return None
        found.append({call["function"]["name"]: arguments})
    return tuple(found)


@dataclass(frozen=True)
class Question:
    """`body` is the request without `model`; `is_right` is the suite's own scorer."""

    name: str
    path: str
    body: dict[str, Any]
    is_right: Callable[[Answer], bool]


def chat(text: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a greedy request with one message of the user."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0} | fields


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines. Raises NoData if there is none."""
    if not path.exists():
        raise NoData(f"{path} is missing")
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
