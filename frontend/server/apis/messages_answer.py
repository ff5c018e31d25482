"""The response of /v1/messages, whole or as Anthropic's events.

Must not know: how the body was checked, templates, the engine.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import Any

from ..http.call import HttpCall
from ..http.errors import ApiError
from ..http.sse import named_event
from ..state import ServerState
from ..turns.answer_run import AnswerRun, ChoiceDelta
from ..turns.blocks import CALL, DELTA, REASONING, START, TEXT, AnswerBlock, BlockEvent
from .block_answer import BlockAnswer

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "timeout": "max_tokens",
}
DELTAS = {
    TEXT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}


class MessagesAnswer(BlockAnswer):
    """The response to one checked body, whole or streamed."""

    comment = named_event("ping", {"type": "ping"})

    def __init__(self, state: ServerState, call: HttpCall, model: str, run: AnswerRun):
        super().__init__(state, call, run)
        self._has_begun = False
        self._head = {
            "id": f"msg_{call.suffix}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def _whole(self, last: ChoiceDelta) -> dict[str, Any]:
        content = [_content(block) for block in self._blocks.blocks]
        return self._head | {"content": content} | _stop(last) | {"usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        """Returns the usage. In this API, cached tokens do not count as input tokens."""
        usage = self._run.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _write(self, delta: ChoiceDelta) -> bytes:
        chunks = []
        if not self._has_begun:
            self._has_begun = True
            chunks.append(self._start())
        chunks += [_event(event) for event in self._take(delta)]
        if delta.finish_reason is not None:
            chunks.append(typed_event("message_delta", delta=_stop(delta), usage=self._usage()))
            chunks.append(typed_event("message_stop"))
        return b"".join(chunks)

    def _start(self) -> bytes:
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
        return typed_event("message_start", message=self._head | nothing | {"usage": self._usage()})

    def _error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.body("/v1/messages") + b"\n\n"


def typed_event(kind: str, **fields: Any) -> bytes:
    """Encodes an event whose type is its name."""
    return named_event(kind, {"type": kind, **fields})


def _stop(end: ChoiceDelta) -> dict[str, Any]:
    """Returns the stop reason. A stop sequence is distinguished from the model's own end."""
    if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    assert end.finish_reason is not None
    return {"stop_reason": STOP_REASONS[end.finish_reason], "stop_sequence": None}


def _content(block: AnswerBlock) -> dict[str, Any]:
    """Returns a content block of a whole response."""
    if block.kind == TEXT:
        return {"type": "text", "text": block.text}
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": _signature(block)}
    return _tool_use(block) | {"input": block.arguments()}


def _tool_use(block: AnswerBlock) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": block.name,
        "input": {},
    }


def _signature(block: AnswerBlock) -> str:
    """Returns a signature, which clients send back, and which some require.

    It is never checked: reasoning is accepted as sent.
    """
    return blake2b(block.text.encode(), digest_size=16).hexdigest()


def _event(event: BlockEvent) -> bytes:
    what, block, text = event
    if what == DELTA:
        kind, name = DELTAS[block.kind]
        return _delta(block, kind, name, text)
    if what == START:
        empty = {
            TEXT: {"type": "text", "text": ""},
            REASONING: {"type": "thinking", "thinking": "", "signature": ""},
        }
        content = _tool_use(block) if block.kind == CALL else empty[block.kind]
        return typed_event("content_block_start", index=block.index, content_block=content)
    stop = typed_event("content_block_stop", index=block.index)
    if block.kind != REASONING:
        return stop
    return _delta(block, "signature_delta", "signature", _signature(block)) + stop


def _delta(block: AnswerBlock, kind: str, name: str, text: str) -> bytes:
    return typed_event("content_block_delta", index=block.index, delta={"type": kind, name: text})
