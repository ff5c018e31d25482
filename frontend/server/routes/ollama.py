"""/api/chat and /api/generate: Ollama's API, one JSON object per line.

Must not know: what its fields mean for a prompt (see ollama_turn.py), templates, the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from ...outputs import PositionLogprobs
from ..apis.ollama_turn import (
    CHAT_NAMES,
    GENERATE_NAMES,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    check_body,
    prepare_generate,
    prepare_ollama_chat,
)
from ..blocks import CALL, DELTA, STOP, TEXT, Block, Blocks
from ..chat_run import ChatRun
from ..http.call import Call, call_of, read_body
from ..http.errors import ApiError, named, unsupported
from ..http.openapi import described
from ..http.sse import EventStream, Json, encode
from ..state import ServerState
from ..token_logprobs import TokenWriter

NDJSON = b"application/x-ndjson"
# Keeps a silent stream alive: JSON allows whitespace before a value, while an empty line would be
# invalid JSON to a client that reads line by line.
SPACE = b" "


def routes(state: ServerState) -> list[Route]:
    @described(OllamaChatBody, dict[str, Any], streams=NDJSON.decode())
    async def chat(request: Request) -> Any:
        """Ollama's chat"""
        body, call = await read_body(request, state.server_config, OllamaChatBody), call_of(request)
        state.ready_engine()
        model = check_body(state, call, body)
        if not body.messages:
            return _loaded(body, model, {"message": {"role": "assistant", "content": ""}})
        with named(CHAT_NAMES):
            run = await prepare_ollama_chat(state, call, body, f"chat-{call.suffix}")
        answer = OllamaAnswer(state, call, model, run, is_chat=True)
        return await answer.whole() if body.stream is False else answer.stream()

    @described(OllamaGenerateBody, dict[str, Any], streams=NDJSON.decode())
    async def generate(request: Request) -> Any:
        """Ollama's generate"""
        body, call = (
            await read_body(request, state.server_config, OllamaGenerateBody),
            call_of(request),
        )
        state.ready_engine()
        model = check_body(state, call, body)
        if not body.prompt:
            return _loaded(body, model, {"response": ""})
        with named(GENERATE_NAMES):
            run = await prepare_generate(state, call, body, f"generate-{call.suffix}")
        answer = OllamaAnswer(state, call, model, run, is_chat=False)
        return await answer.whole() if body.stream is False else answer.stream()

    return [
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
    ]


def _loaded(body: OllamaBody, model: str, empty: dict[str, Any]) -> Json:
    """The response to an empty request, with which clients load or unload a model."""
    if body.keep_alive in (0, "0", "0s"):
        raise unsupported(
            "keep_alive",
            "'keep_alive' cannot be 0: the model stays loaded while the server runs.",
        )
    return Json({"model": model, "created_at": now(), **empty, "done": True, "done_reason": "load"})


class OllamaAnswer:
    """The response to one checked body, whole or streamed, in the format of chat or of generate."""

    def __init__(self, state: ServerState, call: Call, model: str, chat: ChatRun, *, is_chat: bool):
        self._state = state
        self._call = call
        self._model = model
        self._chat = chat
        self._is_chat = is_chat
        self._writer = TokenWriter(state.ready_engine().tokenizer)

    async def whole(self) -> Json:
        (message,) = await self._chat.messages()
        blocks = Blocks()
        blocks.feed(message.parts)
        said: dict[str, Any] = {
            "content": "".join(block.text for block in blocks.blocks if block.kind == TEXT)
        }
        if thinking := "".join(
            block.text for block in blocks.blocks if block.kind not in (TEXT, CALL)
        ):
            said["thinking"] = thinking
        if calls := [call for block in blocks.blocks if (call := _call(block)) is not None]:
            said["tool_calls"] = calls
        return Json(
            self._object(**said)
            | self._logprobs(message.logprobs)
            | self._end(message.finish_reason)
        )

    def stream(self) -> EventStream:
        return self._state.event_stream(
            self._lines(), self._call, error_event=error_line, comment=SPACE, media_type=NDJSON
        )

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        blocks, unsaid = Blocks(), []  # the log-probabilities of tokens whose text has not come yet
        async with aclosing(self._chat.news()) as steps:
            async for (news,) in steps:
                objects = []
                unsaid += news.logprobs or []
                events = blocks.feed(news.parts)
                if news.finish_reason is not None:
                    events += blocks.close()
                for what, block, text in events:
                    if what == DELTA and block.kind != CALL:
                        objects.append(
                            self._object(content=text)
                            if block.kind == TEXT
                            else self._object(thinking=text)
                        )
                    elif what == STOP and (call := _call(block)) is not None:
                        # a call is sent whole
                        objects.append(self._object(tool_calls=[call]))
                if news.finish_reason is not None:
                    objects.append(self._object() | self._end(news.finish_reason))
                if objects and unsaid:
                    objects[0] |= self._logprobs(unsaid)
                    unsaid = []
                if objects:
                    yield b"".join(encode(one) + b"\n" for one in objects)

    def _object(self, content: str = "", **more: Any) -> dict[str, Any]:
        said = (
            {"message": {"role": "assistant", "content": content, **more}}
            if self._is_chat
            else {"response": content, **more}
        )
        return {"model": self._model, "created_at": now(), **said, "done": False}

    def _logprobs(self, positions: list[PositionLogprobs] | None) -> dict[str, Any]:
        """In the format of OpenAI's chat API, which Ollama uses too."""
        return (
            {"logprobs": self._writer.chat(positions, self._chat.params.logprobs or 0)}
            if positions
            else {}
        )

    def _end(self, finish_reason: str | None) -> dict[str, Any]:
        """Durations are in nanoseconds. load_duration is 0: the model is already loaded."""
        usage, metrics = self._chat.usage, self._chat.metrics
        total, prompt, answer = (
            (metrics.e2e_latency, metrics.prefill_time, metrics.decode_time)
            if metrics
            else (None, None, None)
        )
        return {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(prompt),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(answer),
        }


def _call(block: Block) -> dict[str, Any] | None:
    """None if the block is not a call, or if the call is truncated: its arguments are not a JSON
    object, and the response's done_reason is length.
    """
    arguments = block.arguments() if block.kind == CALL else None
    if arguments is None:
        return None
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "function": {"name": block.name, "arguments": arguments},
    }


def _nanoseconds(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def error_line(error: ApiError) -> bytes:
    return error.body("/api/") + b"\n"
