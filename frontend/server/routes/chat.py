"""/v1/chat/completions: OpenAI's chat.
May know: chat_run, sampling, the shape of OpenAI's chat completions.
Must not know: templates, formats of tool calls, the engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...answer_format import Content, Part, Reasoning, ToolCallStart
from ..call import Call, call_of, read_body
from ..chat_run import ChatRun, ChatTurn, ChoiceNews, Message, prepare_chat
from ..sampling import Number, SamplingBody, sampling_params
from ..sse import DONE, EventStream, Json, encode, event
from ..state import ServerState


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    top_k: int | None = None
    min_p: Number | None = None


def routes(state: ServerState) -> list[Route]:
    async def create(request: Request) -> Any:
        body = await read_body(request, state.server_config, ChatBody)
        call, model = call_of(request), state.check_model(body.model)
        answer = ChatAnswer(state, call, body, model, await prepare_chat(state, call, _turn(state, call, body)))
        if body.stream:
            return answer.stream()
        return await answer.whole()

    return [Route("/v1/chat/completions", create, methods=["POST"])]


def _turn(state: ServerState, call: Call, body: ChatBody) -> ChatTurn:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    defaults = state.ready_engine().get_default_sampling_params()
    params = sampling_params(body, defaults, state.server_config, max_tokens=max_tokens, logprobs=logprobs)
    continues = bool(body.continue_final_message)
    return ChatTurn(
        f"chatcmpl-{call.suffix}",
        body.messages,
        params,
        max_tokens,
        body.tools,
        "auto" if body.tool_choice is None else body.tool_choice,
        body.parallel_tool_calls is not False,
        body.chat_template_kwargs or {},
        body.documents,
        not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continues,
        body.priority or 0,
        body.cache_salt,
        {"prompt": "messages", "max_tokens": name},
    )


class ChatAnswer:
    """The answer to one checked body: whole or streamed."""

    def __init__(self, state: ServerState, call: Call, body: ChatBody, model: str, chat: ChatRun):
        self._state = state
        self._call = call
        self._body = body
        self._chat = chat
        self._head = {
            "id": f"chatcmpl-{call.suffix}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": state.system_fingerprint,
        }

    async def whole(self) -> Response:
        choices = [self._choice(index, message) for index, message in enumerate(await self._chat.messages())]
        return Json(self._head | {"choices": choices, "usage": self._chat.usage.as_openai()})

    def _choice(self, index: int, message: Message) -> dict[str, Any]:
        answer = message.answer()
        said: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.tool_calls else ""), "refusal": None}
        if answer.reasoning:
            said["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            said["tool_calls"] = [
                {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.tool_calls
            ]
        return {"index": index, "message": said, "logprobs": None, "finish_reason": message.finish_reason}

    def stream(self) -> EventStream:
        return self._state.event_stream(self._events(), self._call)

    async def _events(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        wants_usage = bool(options and options.include_usage)
        chunk_head = self._head | {"object": "chat.completion.chunk"}
        end = {"usage": None} if wants_usage else {}

        def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
            return event(chunk_head | {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]} | end)

        # A chunk of plain content is its text between two constants.
        head, tail = encode(chunk_head)[:-1], b'},"logprobs":null,"finish_reason":null}]' + (b',"usage":null}' if wants_usage else b"}") + b"\n\n"
        starts: dict[int, bytes] = {}

        def of(news: ChoiceNews) -> list[bytes]:
            index, chunks = news.index, []
            if (start := starts.get(index)) is None:
                start = starts[index] = b"data: " + head + b',"choices":[{"index":%d,"delta":{"content":' % index
                chunks.append(chunk(index, {"role": "assistant", "content": "", "refusal": None}))
            for part in news.parts:
                chunks.append(start + encode(part.text) + tail if isinstance(part, Content) else chunk(index, _delta(part)))
            if news.finish_reason is not None:
                chunks.append(chunk(index, {}, news.finish_reason))
            return chunks

        async with aclosing(self._chat.news()) as steps:
            async for step in steps:
                if chunks := [one for news in step for one in of(news)]:
                    yield b"".join(chunks)
        if wants_usage:
            yield event(chunk_head | {"choices": [], "usage": self._chat.usage.as_openai()})
        yield DONE


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if isinstance(part, ToolCallStart):
        function = {"name": part.name, "arguments": ""}
        return {"tool_calls": [{"index": part.index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
