"""Converts a body of /v1/responses to a turn of a conversation.

Must not know: items (responses_items.py), the format of the response, where responses are stored,
HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from ....ipc.checks import INT64_MAX
from ....ipc.params import SamplingParams, StructuredOutputsParams
from ..http.bodies import FieldLimit
from ..http.call import HttpCall
from ..http.errors import invalid, missing, unsupported
from ..state import ServerState
from ..turns.chat_turn import ChatTurn, thinking_variables
from ..turns.response_format import json_options
from ..turns.sampling import MAX_LOGPROBS, Probability, sampling_params
from .responses_items import Item, messages_of
from .responses_tools import CheckedTools, ResponsesToolChoice, SentResponsesTool

# The keys are internal parameter names, and the values the names in this API, for errors.
NAMES = {
    "prompt": "input",
    "multi_modal_data": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "structured_outputs": "text.format",
    "structured_outputs.json": "text.format.schema",
}
LOGPROBS = "message.output_text.logprobs"
# `include` may have these values. Reasoning is returned in plain text, so it needs no encryption;
# the others concern tools that this server does not have.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
MAX_METADATA = 16
# SamplingParams have these fields under the same names.
SAME = ("temperature", "top_p", "top_k", "min_p", "seed")
IGNORED = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "client_metadata",
    "max_tool_calls",
)


class Format(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: Format | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None  # models here return the reasoning itself
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ConversationRef(msgspec.Struct, kw_only=True):
    id: str


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses. None: the field was not sent."""

    # Elsewhere `prompt` is text or token ids. Here it is an object.
    field_limits: ClassVar[dict[str, FieldLimit]] = {"prompt": FieldLimit()}

    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    max_tool_calls: int | None = None  # concerns built-in tools, of which there are none
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: list[SentResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Annotated[str, Meta(extra_json_schema={"enum": ["auto", "disabled"]})] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None  # every prefix is cached
    prompt_cache_retention: str | None = None
    client_metadata: dict[str, Any] | None = None  # of Codex, about its session
    service_tier: str | None = None  # there is only one
    conversation: str | ConversationRef | None = None
    # rejected
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    # Codex tries a server out with it: false asks for no answer.
    generate: bool | None = None
    # extensions of other servers
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None

    @property
    def conversation_id(self) -> str:
        """Returns the id of the conversation of a body that has one."""
        ref = self.conversation
        return ref.id if isinstance(ref, ConversationRef) else ref or ""


def check_body(body: ResponsesBody) -> None:
    """Rejects unsupported fields, each with an explanation."""
    if body.background:
        raise unsupported(
            "background",
            "'background' is not supported: the client must wait for the response. Omit it "
            "and stream.",
        )
    if body.conversation is not None and body.previous_response_id is not None:
        raise invalid(
            "conversation", "'conversation' and 'previous_response_id' exclude each other."
        )
    if body.prompt is not None:
        raise unsupported(
            "prompt",
            "'prompt' refers to a template stored at OpenAI, which this server does not have: send "
            "'input' and 'instructions'.",
        )
    if unknown := [name for name in body.include or [] if name not in INCLUDABLE]:
        raise invalid(
            "include",
            f"'include' cannot ask for {unknown[0]!r:.60}; it can for {', '.join(INCLUDABLE)}.",
        )
    if body.truncation not in (None, "auto", "disabled"):
        raise invalid(
            "truncation", f"'truncation' must be auto or disabled, got {body.truncation!r:.40}."
        )


def turn_of(
    state: ServerState,
    call: HttpCall,
    body: ResponsesBody,
    request_id: str,
    tools: CheckedTools,
    items: list[Item],
    num_earlier: int,
) -> ChatTurn:
    """`items` are the whole conversation. The first `num_earlier` come from earlier turns.

    Raises ApiError, or InvalidParameterError with internal parameter names.
    """
    params = params_of(state, body)
    call.ignored_params += tools.ignored
    effort = body.reasoning and body.reasoning.effort
    variables = thinking_variables(
        state,
        call,
        None if effort is None else effort != "none",
        effort,
        ("reasoning.effort", "reasoning.effort"),
    )
    _note_ignored(call, body)
    return ChatTurn(
        request_id,
        messages_of(
            body.instructions,
            items,
            num_earlier,
            "previous_response_id" if body.conversation is None else "conversation",
            reads_images=state.reads_images,
        ),
        params,
        body.max_output_tokens,
        tools.functions,
        tools.choice,
        body.parallel_tool_calls is not False,
        variables | (body.chat_template_kwargs or {}),
        names=NAMES,
        json=json_options(body, state.server_config),
        streams_calls=True,
    )


def params_of(state: ServerState, body: ResponsesBody) -> SamplingParams:
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or [])
    return sampling_params(
        state,
        {name: getattr(body, name) for name in SAME},
        json_options(body, state.server_config),
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        structured_outputs=_structured_outputs(body.text and body.text.format),
        # Only while tokens arrive is it known which token belongs to which item.
        streams=body.stream or wants_logprobs,
    )


def _note_ignored(call: HttpCall, body: ResponsesBody) -> None:
    ignored = [name for name in IGNORED if getattr(body, name) is not None]
    if body.service_tier not in (None, "auto", "default"):
        ignored.append("service_tier")
    if body.text and body.text.verbosity not in (None, "medium"):
        ignored.append("text.verbosity")
    ignored += [
        f"reasoning.{name}"
        for name in ("summary", "generate_summary")
        if body.reasoning and getattr(body.reasoning, name) is not None
    ]
    if body.stream_options and body.stream_options.include_obfuscation:
        ignored.append("stream_options.include_obfuscation")
    call.ignored_params += ignored


def _structured_outputs(format: Format | None) -> StructuredOutputsParams | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if format.type != "json_schema":
        raise unsupported(
            "text.format.type",
            f"'text.format.type' must be text, json_object or json_schema, got "
            f"{format.type!r:.40}.",
        )
    if format.schema is None:
        raise missing("text.format.schema")
    return StructuredOutputsParams(json=format.schema)
