"""/v1/chat/completions: OpenAI's chat API.

Must not know: templates, formats of tool calls, the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request

from ....ipc.checks import INT64_MAX
from ...text.chat_template import template_variables
from ..apis.chat_answer import ChatAnswer, ChatCompletion
from ..apis.openai_messages import OpenAIMessage, plain_messages
from ..apis.openai_tools import SentTool, ToolChoice, checked_tools
from ..http.call import HttpCall, call_of
from ..http.errors import invalid
from ..http.openapi import EVENTS, ApiRoute
from ..request_body import read_body
from ..state import ServerState
from ..turns.chat_turn import ChatTurn, prepare_chat, thinking_variables
from ..turns.response_format import json_options, structured_outputs_of
from ..turns.sampling import (
    MAX_LOGPROBS,
    SamplingBody,
    check_fields,
    field_names,
    openai_fields,
    sampling_params,
)

# Requests cannot set these template variables. Some have a field of their own.
RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "self",
    }
)
MaxTokens = Annotated[int, Meta(ge=1, le=INT64_MAX)]


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[OpenAIMessage], Meta(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[SentTool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    verbosity: Literal["low", "medium", "high"] | None = None
    # rejected
    audio: dict[str, Any] | None = None
    modalities: list[str] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template: str | None = None
    # vLLM's extensions
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


def routes(state: ServerState) -> list[ApiRoute]:
    async def create(request: Request) -> Any:
        """OpenAI's chat completions"""
        body = await read_body(request, state.server_config, ChatBody)
        call = call_of(request)
        model = state.select_model(body.model, call)
        run = await prepare_chat(state, call, chat_turn(state, call, body))
        return await ChatAnswer(state, call, body, model, run).respond()

    return [
        ApiRoute(
            "/v1/chat/completions", create, body=ChatBody, answer=ChatCompletion, streams=EVENTS
        )
    ]


def chat_turn(state: ServerState, call: HttpCall, body: ChatBody) -> ChatTurn:
    """Checks the body and converts it to a turn."""
    check_fields(body, call)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "'logprobs' must be true where 'top_logprobs' is given.")
    max_tokens = (
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    names = field_names(body) | {
        "prompt": "messages",
        "multi_modal_data": "messages",
        "prompt_token_ids": "messages",
        "logprobs": "top_logprobs",
        "strict": "tools.function.strict",
    }
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    tools, tool_choice = checked_tools(body.tools, body.tool_choice)
    state.check_generates()
    json = json_options(body, state.server_config)
    params = sampling_params(
        state,
        openai_fields(body),
        json,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=structured_outputs_of(body),
        streams=body.stream,
        names=names,
    )
    continues = bool(body.continue_final_message)
    if continues and body.messages[-1].__struct_config__.tag != "assistant":
        raise invalid(
            "continue_final_message",
            "The last of 'messages' must be an assistant message to be continued.",
        )
    if body.mm_processor_kwargs and not state.reads_images:
        raise invalid("mm_processor_kwargs", "This model reads text only.")
    return ChatTurn(
        request_id=f"chatcmpl-{call.suffix}",
        messages=plain_messages(body.messages, call, state.reads_images),
        params=params,
        max_tokens=max_tokens,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_variables=_template_variables(state, call, body),
        documents=body.documents,
        processor_kwargs=body.mm_processor_kwargs,
        add_generation_prompt=not continues
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=continues,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        names=names,
        json=json,
        streams_calls=True,
    )


def _template_variables(state: ServerState, call: HttpCall, body: ChatBody) -> dict[str, Any]:
    """Returns variables that only a template can use.

    A name that does not occur in the template has no effect and is reported as ignored.
    """
    variables: dict[str, Any] = {}
    if (effort := body.reasoning_effort) is not None:
        is_level = effort != "none" or "reasoning_effort" in template_variables(state.template_text)
        enabled, level = (None, effort) if is_level else (False, None)
        names = ("reasoning_effort", "reasoning_effort")
        variables = thinking_variables(state, call, enabled, level, names)
    if body.documents and "documents" not in state.template_text:
        call.ignored_params.append("documents")
    given = checked_variables(body.chat_template_kwargs)
    call.ignored_params += [
        f"chat_template_kwargs.{name}" for name in given if name not in state.template_text
    ]
    return variables | given


def checked_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the checked chat_template_kwargs."""
    if given is None:
        return {}
    if reserved := RESERVED_VARIABLES & given.keys():
        name = f"chat_template_kwargs.{min(reserved)}"
        raise invalid(name, f"'{name}' cannot be set: the server sets this template variable.")
    return given
