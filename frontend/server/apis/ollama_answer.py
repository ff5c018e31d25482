"""The response of Ollama's /api/chat and /api/generate: one JSON object, or one per line.

Must not know: how the body was checked, templates, the engine.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import Any

from ...outputs import PositionLogprobs
from ..http.call import HttpCall
from ..http.errors import ApiError
from ..http.sse import encode
from ..state import ServerState
from ..turns.answer_run import AnswerRun, ChoiceDelta
from ..turns.blocks import CALL, DELTA, REASONING, STOP, TEXT, AnswerBlock, BlockEvent
from .block_answer import BlockAnswer

NDJSON = b"application/x-ndjson"


class OllamaAnswer(BlockAnswer):
    """The response to one checked body, whole or streamed, in the format of chat or of generate."""

    # Spaces keep a silent stream alive: JSON allows whitespace before a value, while an empty line
    # would be invalid JSON to a client that reads line by line.
    comment = b" "
    media_type = NDJSON

    def __init__(
        self, state: ServerState, call: HttpCall, model: str, run: AnswerRun, *, is_chat: bool
    ):
        super().__init__(state, call, run)
        self._model = model
        self._is_chat = is_chat
        self._unsent: list[PositionLogprobs] = []  # of tokens whose text has not been sent yet

    def _whole(self, last: ChoiceDelta) -> dict[str, Any]:
        blocks = self._blocks.blocks
        said: dict[str, Any] = {"content": _text(blocks, TEXT)}
        if thinking := _text(blocks, REASONING):
            said["thinking"] = thinking
        if calls := [call for block in blocks if (call := _call(block)) is not None]:
            said["tool_calls"] = calls
        return self._object(**said) | self._logprobs() | self._end(last.finish_reason)

    def _take(self, delta: ChoiceDelta) -> list[BlockEvent]:
        self._unsent += delta.logprobs or []
        return super()._take(delta)

    def _write(self, delta: ChoiceDelta) -> bytes:
        objects = []
        for what, block, text in self._take(delta):
            if what == DELTA and block.kind == TEXT:
                objects.append(self._object(content=text))
            elif what == DELTA and block.kind == REASONING:
                objects.append(self._object(thinking=text))
            elif what == STOP and (call := _call(block)) is not None:
                objects.append(self._object(tool_calls=[call]))  # a call is sent whole
        if delta.finish_reason is not None:
            objects.append(self._object() | self._end(delta.finish_reason))
        if objects:
            objects[0] |= self._logprobs()
        return b"".join([encode(one) + b"\n" for one in objects])

    def _object(self, content: str = "", **more: Any) -> dict[str, Any]:
        return _object(self._model, content, is_chat=self._is_chat, **more) | {"done": False}

    def _logprobs(self) -> dict[str, Any]:
        """Returns the log-probabilities of the unsent tokens, in the format of OpenAI's chat API,
        which Ollama uses too.
        """
        positions, self._unsent = self._unsent, []
        num_top = self._run.params.logprobs or 0
        return {"logprobs": self._writer.chat(positions, num_top)} if positions else {}

    def _end(self, finish_reason: str | None) -> dict[str, Any]:
        """Returns the last fields. Durations are in nanoseconds. load_duration is 0: the model is
        already loaded.
        """
        usage, metrics = self._run.usage, self._run.metrics
        return {
            "done": True,
            "done_reason": "length" if finish_reason in ("length", "timeout") else "stop",
            "total_duration": _nanoseconds(metrics and metrics.e2e_latency),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(metrics and metrics.prefill_time),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(metrics and metrics.decode_time),
        }

    def _error_event(self, error: ApiError) -> bytes:
        return error_line(error)


def _object(model: str, content: str, *, is_chat: bool, **more: Any) -> dict[str, Any]:
    said = (
        {"message": {"role": "assistant", "content": content, **more}}
        if is_chat
        else {"response": content, **more}
    )
    return {"model": model, "created_at": now(), **said}


def empty_answer(model: str, reason: str, *, is_chat: bool) -> dict[str, Any]:
    """Returns the answer to a request without a prompt, which loads or unloads the model."""
    return _object(model, "", is_chat=is_chat) | {"done": True, "done_reason": reason}


def error_line(error: ApiError) -> bytes:
    return error.body("/api/") + b"\n"


def _text(blocks: list[AnswerBlock], kind: str) -> str:
    return "".join(block.text for block in blocks if block.kind == kind)


def _call(block: AnswerBlock) -> dict[str, Any] | None:
    """Returns None if the block is not a call."""
    if block.kind != CALL:
        return None
    return {
        "id": block.call_id or f"call_{secrets.token_hex(12)}",
        "function": {"name": block.name, "arguments": block.arguments()},
    }


def _nanoseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)


def now() -> str:
    return time_text(time.time())


def time_text(moment: float) -> str:
    """`moment` is in seconds since 1970."""
    return datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")
