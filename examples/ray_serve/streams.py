"""Continues a stream of OpenAI's completions or chat completions on another replica.

The same request with the same seed gives the same text on every replica, however it is cut into
chunks. So a request whose replica has died is sent again, and what its client already has is taken
off the new stream.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

RESUMABLE = ("/v1/completions", "/v1/chat/completions")
TEXTS = ("text", "content", "reasoning_content", "reasoning")  # fields that grow by appending
OTHERS = ("tool_calls", "logprobs", "token_ids")  # fields that cannot be cut by characters


def with_seed(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a request that can be repeated: without a seed it gets one."""
    return body if body.get("seed") is not None else body | {"seed": random.getrandbits(31)}


class Delivered:
    """What the client of one stream has got."""

    def __init__(self) -> None:
        self.can_resume = True  # nothing was sent that cannot be cut
        self._sent: Counter[tuple[int, str]] = Counter()  # characters by choice and field
        self._to_skip: Counter[tuple[int, str]] = Counter()
        self._identity: dict[str, Any] = {}  # id and time of the first chunk

    def resume(self) -> None:
        """The next event is the first one of a repeated request."""
        self._to_skip = self._sent.copy()

    def new_part(self, event: bytes) -> bytes:
        """The part of an event that the client does not have; b"" if it has all."""
        if not event.startswith(b"data: {"):
            return event  # a comment, or the end
        chunk = json.loads(event[len(b"data: ") :])
        if not self._identity:
            self._identity = {name: chunk[name] for name in ("id", "created") if name in chunk}
        chunk |= self._identity
        if choices := chunk.get("choices"):
            chunk["choices"] = [choice for choice in choices if self._cut(choice)]
            is_new = bool(chunk["choices"])
        else:  # the usage at the end, or an error
            is_new = "error" in chunk or bool(self._counts((-1, "usage"), "x"))
        if not is_new:
            return b""
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Takes off what has been sent. Returns whether anything is left."""
        index, parts = choice.get("index", 0), choice.get("delta", choice)
        if any(choice.get(name) or parts.get(name) for name in OTHERS):
            self.can_resume = False
        is_new = False
        for name in TEXTS:
            if isinstance(text := parts.get(name), str):
                parts[name] = self._counts((index, name), text)
                is_new |= bool(parts[name])
        for name in ("role", "finish_reason"):
            if has_it := (parts.get(name) or choice.get(name)):
                is_new |= bool(self._counts((index, name), has_it))
        return is_new or not self.can_resume

    def _counts(self, key: tuple[int, str], text: str) -> str:
        """The part of the text beyond what has been sent, which is now sent too."""
        num_old = min(len(text), self._to_skip[key])
        self._to_skip[key] -= num_old
        self._sent[key] += len(text) - num_old
        return text[num_old:]
