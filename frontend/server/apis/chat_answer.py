"""The response of /v1/chat/completions, whole or streamed, in OpenAI's format with common
extensions.

Must not know: how the body was checked, templates, formats of tool calls, the engine.

Reasoning is sent as `reasoning_content` (DeepSeek's name, which most clients read) and as
`reasoning` (vLLM's newer name).
"""

from __future__ import annotations

import secrets
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from ...answer_format import Content, Part, Reasoning, ToolCallStart
from ..http.call import HttpCall
from ..state import ServerState
from ..turns.answer_run import AnswerRun, ChoiceDelta, FinishedChoice, UsageCounts
from ..turns.token_logprobs import ChatLogprobs, prompt_logprobs
from .openai_answer import OpenAIAnswer


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


ChatFinishReason = Literal[
    "stop", "length", "tool_calls", "content_filter", "function_call", "timeout"
]


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    # As vLLM's extension, it has the stop token or string, and null for the end of sequence.
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


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageCounts | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(OpenAIAnswer):
    """The response to one checked body (routes/chat.py)."""

    id_prefix = "chatcmpl"
    object, type = "chat.completion", ChatCompletion
    object_of_chunk, type_of_chunk = "chat.completion.chunk", ChatChunk
    text_path = ("delta", "content")

    def __init__(self, state: ServerState, call: HttpCall, body: Any, model: str, run: AnswerRun):
        super().__init__(state, call, body, model, run)
        self._shows_reasoning = body.include_reasoning is not False
        if body.service_tier is not None:
            self._tail["service_tier"] = "default"  # the only tier

    def _completion(self, messages: list[FinishedChoice]) -> ChatCompletion:
        answer = super()._completion(messages)
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._run.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(self._run.outputs[0].prompt_logprobs)
        return answer

    def _whole_choices(self, messages: list[FinishedChoice]) -> list[ChatChoice]:
        return [self._choice(message) for message in messages]

    def _choice(self, message: FinishedChoice) -> ChatChoice:
        answer = message.answer()
        said = ChatMessage(content=answer.content or (None if answer.tool_calls else ""))
        if answer.reasoning and self._shows_reasoning:
            said.reasoning_content = said.reasoning = answer.reasoning
        if answer.tool_calls:
            said.tool_calls = [
                ToolCall(
                    call.id or new_call_id(), "function", FunctionCall(call.name, call.arguments)
                )
                for call in answer.tool_calls
            ]
        choice = ChatChoice(
            index=message.index,
            message=said,
            finish_reason=cast(ChatFinishReason, message.finish_reason),
            stop_reason=message.stop_reason,
        )
        self._add_tokens(choice, message)
        return choice

    def _add_tokens(self, choice: ChatChoice | ChunkChoice, delta: ChoiceDelta) -> None:
        """Adds the log-probabilities and ids of new tokens, if they are requested."""
        if delta.logprobs is not None and self._body.logprobs:
            choice.logprobs = ChatLogprobs(
                self._writer.chat(delta.logprobs, self._body.top_logprobs or 0)
            )
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids

    # ------------------------------------------------------------ streamed

    def _beginning(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        prompt = self._run.prompt_token_ids if self._body.return_token_ids else UNSET
        return self._chunk([ChunkChoice(index=index, delta=delta)], prompt_token_ids=prompt)

    def _text_choice(self, index: int, text: str) -> ChunkChoice:
        return ChunkChoice(index=index, delta={"content": text})

    def _choices(self, delta: ChoiceDelta) -> list[ChunkChoice]:
        """Returns one choice per part, and one for the end. Log-probabilities and token ids are
        added to the first part, or sent in an empty one if there is no part yet.
        """
        choices = [
            ChunkChoice(index=delta.index, delta=_delta(part))
            for part in delta.parts
            if self._shows_reasoning or not isinstance(part, Reasoning)
        ]
        has_more = bool(self._body.logprobs and delta.logprobs) or self._body.return_token_ids
        if not choices and delta.token_ids and has_more:
            choices = [self._text_choice(delta.index, "")]
        if choices:
            self._add_tokens(choices[0], delta)
        if delta.finish_reason is not None:
            end = ChunkChoice(
                index=delta.index,
                delta={},
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            choices.append(end)
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
                    "id": part.id or new_call_id(),
                    "type": "function",
                    "function": {"name": part.name, "arguments": ""},
                }
            ]
        }
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
