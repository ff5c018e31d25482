"""/v1/messages: Anthropic's API.

Must not know: what its fields mean for a prompt (see messages_turn.py), templates, the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from hashlib import blake2b
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..apis.messages_turn import NAMES, MessagesBody, PromptBody, turn_of
from ..blocks import CALL, DELTA, REASONING, START, TEXT, Block, BlockEvent, Blocks, read_blocks
from ..chat_run import ChatRun, ChoiceNews, Message, prepare_chat, render_turn
from ..http.call import Call, call_of, read_body
from ..http.errors import ApiError, named
from ..http.openapi import described
from ..http.sse import EventStream, Json, named_event
from ..state import ServerState

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {
    TEXT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}
PING = named_event("ping", {"type": "ping"})


def routes(state: ServerState) -> list[Route]:
    @described(MessagesBody, dict[str, Any], streams=True)
    async def create(request: Request) -> Any:
        """Anthropic's messages"""
        body, call = await read_body(request, state.server_config, MessagesBody), call_of(request)
        model = state.check_model(body.model)
        with named(NAMES):
            chat = await prepare_chat(state, call, turn_of(state, call, body, f"msg_{call.suffix}"))
        answer = MessagesAnswer(state, call, model, chat)
        return answer.stream() if body.stream else await answer.whole()

    @described(PromptBody, dict[str, int])
    async def count_tokens(request: Request) -> Response:
        """How many tokens a message's prompt has"""
        body, call = await read_body(request, state.server_config, PromptBody), call_of(request)
        state.check_model(body.model)
        with named(NAMES):
            _, token_ids = await render_turn(
                state, call, turn_of(state, call, body, f"msg_{call.suffix}")
            )
        return Json({"input_tokens": len(token_ids)})

    return [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


class MessagesAnswer:
    """The response to one checked body, whole or streamed."""

    def __init__(self, state: ServerState, call: Call, model: str, chat: ChatRun):
        self._state = state
        self._call = call
        self._chat = chat
        self._head = {
            "id": f"msg_{call.suffix}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    async def whole(self) -> Response:
        blocks, message = await read_blocks(self._chat)
        return Json(
            self._head
            | {"content": [_content(block) for block in blocks]}
            | _stop(message)
            | {"usage": self._usage()}
        )

    def _usage(self) -> dict[str, int]:
        """In this API, cached tokens do not count as input tokens."""
        usage = self._chat.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def stream(self) -> EventStream:
        return self._state.event_stream(
            self._events(), self._call, error_event=error_event, comment=PING
        )

    async def _events(self) -> AsyncGenerator[bytes, None]:
        blocks, has_begun = Blocks(), False
        async with aclosing(self._chat.news()) as steps:
            async for (news,) in steps:
                chunks = []
                if not has_begun:
                    has_begun = True
                    chunks.append(self._start())
                chunks += [_event(event) for event in blocks.feed(news.parts)]
                if news.finish_reason is not None:
                    chunks += [_event(event) for event in blocks.close()]
                    chunks.append(
                        named_event(
                            "message_delta",
                            {"type": "message_delta", "delta": _stop(news), "usage": self._usage()},
                        )
                    )
                    chunks.append(named_event("message_stop", {"type": "message_stop"}))
                if chunks:
                    yield b"".join(chunks)

    def _start(self) -> bytes:
        message = self._head | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        return named_event("message_start", {"type": "message_start", "message": message})


def _stop(end: ChoiceNews | Message) -> dict[str, Any]:
    """The stop reason. A stop sequence is distinguished from the model's own end."""
    if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
    assert end.finish_reason is not None
    return {"stop_reason": STOP_REASONS[end.finish_reason], "stop_sequence": None}


def _content(block: Block) -> dict[str, Any]:
    """A content block of a whole response.

    The arguments of a truncated call are not a JSON object; the response's stop_reason is then
    max_tokens.
    """
    if block.kind == TEXT:
        return {"type": "text", "text": block.text}
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": _signature(block)}
    return _tool_use(block) | {"input": block.arguments() or {}}


def _tool_use(block: Block) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": block.name,
        "input": {},
    }


def _signature(block: Block) -> str:
    """Clients send the signature back, and some require one.

    It is never checked: reasoning is accepted as sent.
    """
    return blake2b(block.text.encode(), digest_size=16).hexdigest()


def _event(event: BlockEvent) -> bytes:
    what, block, text = event
    if what == DELTA:
        kind, name = DELTAS[block.kind]
        return named_event(
            "content_block_delta",
            {
                "type": "content_block_delta",
                "index": block.index,
                "delta": {"type": kind, name: text},
            },
        )
    if what == START:
        empty = {
            TEXT: {"type": "text", "text": ""},
            REASONING: {"type": "thinking", "thinking": "", "signature": ""},
        }
        content = _tool_use(block) if block.kind == CALL else empty[block.kind]
        return named_event(
            "content_block_start",
            {"type": "content_block_start", "index": block.index, "content_block": content},
        )
    stop = named_event("content_block_stop", {"type": "content_block_stop", "index": block.index})
    if block.kind != REASONING:
        return stop
    delta = {"type": "signature_delta", "signature": _signature(block)}
    return (
        named_event(
            "content_block_delta",
            {"type": "content_block_delta", "index": block.index, "delta": delta},
        )
        + stop
    )


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error.body("/v1/messages") + b"\n\n"
