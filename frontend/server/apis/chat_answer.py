"""The response of /v1/chat/completions, whole or streamed, in OpenAI's format with common
extensions.

Must not know: how the body was checked, templates, formats of tool calls, the engine.

Reasoning is sent as `reasoning_content` (DeepSeek's name, which most clients read) and as
`reasoning` (vLLM's newer name).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ...answer_format import Content, Part, Reasoning, ToolCallStart
from ..chat_run import ChatRun, ChoiceNews, Message
from ..http.call import Call
from ..http.sse import DONE, EventStream, encode, event, json_of
from ..state import ServerState
from ..token_logprobs import ChatLogprobs, TokenWriter, prompt_logprobs
from ..usage import UsageCounts


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    # vLLM's extension: the stop token or string, null for the end of sequence
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageCounts
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Chunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageCounts | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatAnswer:
    """The response to one checked body (routes/chat.py)."""

    def __init__(self, state: ServerState, call: Call, body: Any, model: str, chat: ChatRun):
        self._state = state
        self._call = call
        self._body = body
        self._chat = chat
        self._writer = TokenWriter(
            state.ready_engine().tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        )
        self._shows_reasoning = body.include_reasoning is not False
        self._head = {
            "id": f"chatcmpl-{call.suffix}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tail: dict[str, Any] = {"system_fingerprint": state.system_fingerprint}
        if body.service_tier is not None:
            self._tail["service_tier"] = "default"  # the only tier

    # ------------------------------------------------------------ whole

    async def whole(self) -> Response:
        messages = await self._chat.messages()
        num_positions = sum(len(message.logprobs or []) for message in messages) + len(
            self._chat.prompt_logprobs or []
        )
        return await json_of(
            lambda: self._completion(messages), num_positions * (1 + (self._body.top_logprobs or 0))
        )

    def _completion(self, messages: list[Message]) -> ChatCompletion:
        choices = [self._choice(index, message) for index, message in enumerate(messages)]
        answer = ChatCompletion(
            **self._head, choices=choices, usage=self._chat.usage.counts(), **self._tail
        )
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._chat.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(self._chat.prompt_logprobs)
        return answer

    def _choice(self, index: int, message: Message) -> ChatChoice:
        answer = message.answer()
        said = ChatMessage(content=answer.content or (None if answer.tool_calls else ""))
        if answer.reasoning and self._shows_reasoning:
            said.reasoning_content = said.reasoning = answer.reasoning
        if answer.tool_calls:
            said.tool_calls = [
                ToolCall(new_call_id(), "function", FunctionCall(call.name, call.arguments))
                for call in answer.tool_calls
            ]
        choice = ChatChoice(
            index=index,
            message=said,
            finish_reason=cast(FinishReason, message.finish_reason),
            stop_reason=message.stop_reason,
        )
        if message.logprobs is not None and self._body.logprobs:
            choice.logprobs = ChatLogprobs(
                self._writer.chat(message.logprobs, self._body.top_logprobs or 0)
            )
        if self._body.return_token_ids:
            choice.token_ids = message.token_ids
        return choice

    # ------------------------------------------------------------ streamed

    def stream(self) -> EventStream:
        return self._state.event_stream(self._events(), self._call)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        body, options = self._body, self._body.stream_options
        wants_usage = bool(options and options.include_usage)
        counts_always = wants_usage and bool(options.continuous_usage_stats)
        head = self._head | {"object": "chat.completion.chunk"}
        is_plain = not body.logprobs and not body.return_token_ids and not counts_always
        # A chunk of plain content is its text between two constants.
        before = b"data: " + encode(head)[:-1] + b',"choices":[{"index":%d,"delta":{"content":'
        after = (
            b'},"logprobs":null,"finish_reason":null}]'
            + (b',"usage":null,' if wants_usage else b",")
            + encode(self._tail)[1:]
            + b"\n\n"
        )
        starts: dict[int, bytes] = {}

        def chunk(choices: list[ChunkChoice], usage: Any, **more: Any) -> bytes:
            return event(Chunk(**head, choices=choices, usage=usage, **self._tail, **more))

        def of(news: ChoiceNews) -> bytes:
            usage = self._chat.usage.counts() if counts_always else None if wants_usage else UNSET
            index, chunks = news.index, b""
            if (start := starts.get(index)) is None:
                start = starts[index] = before % index
                more = (
                    {"prompt_token_ids": self._chat.prompt_token_ids}
                    if body.return_token_ids
                    else {}
                )
                chunks = chunk(
                    [
                        ChunkChoice(
                            index=index, delta={"role": "assistant", "content": "", "refusal": None}
                        )
                    ],
                    usage,
                    **more,
                )
            if is_plain and len(news.parts) == 1 and isinstance(news.parts[0], Content):
                chunks += start + encode(news.parts[0].text) + after
            else:
                chunks += b"".join([chunk([choice], usage) for choice in self._deltas(news)])
            if news.finish_reason is not None:
                end = ChunkChoice(
                    index=index,
                    delta={},
                    finish_reason=news.finish_reason,
                    stop_reason=news.stop_reason,
                )
                chunks += chunk([end], usage)
            return chunks

        def write_down(step: list[ChoiceNews]) -> bytes:
            return b"".join([of(news) for news in step])

        def write_text(text: str) -> bytes:
            return starts[0] + encode(text) + after

        async with aclosing(self._chat.news(write_down, write_text if is_plain else None)) as steps:
            async for step in steps:
                if chunks := write_down(step):
                    yield chunks
        if wants_usage:
            yield chunk([], self._chat.usage.counts())
        yield DONE

    def _deltas(self, news: ChoiceNews) -> list[ChunkChoice]:
        """One choice per part. Log-probabilities and token ids are added to the first, or sent in
        an empty choice if there is no part yet.
        """
        parts = [
            part for part in news.parts if self._shows_reasoning or not isinstance(part, Reasoning)
        ]
        choices = [ChunkChoice(index=news.index, delta=_delta(part)) for part in parts]
        logprobs = news.logprobs if self._body.logprobs else None
        if not choices and news.token_ids and (logprobs or self._body.return_token_ids):
            choices = [ChunkChoice(index=news.index, delta={"content": ""})]
        if choices and logprobs:
            choices[0].logprobs = ChatLogprobs(
                self._writer.chat(logprobs, self._body.top_logprobs or 0)
            )
        if choices and self._body.return_token_ids:
            choices[0].token_ids = news.token_ids
        return choices


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text, "reasoning": part.text}
    if isinstance(part, ToolCallStart):
        return {
            "tool_calls": [
                {
                    "index": part.index,
                    "id": new_call_id(),
                    "type": "function",
                    "function": {"name": part.name, "arguments": ""},
                }
            ]
        }
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
