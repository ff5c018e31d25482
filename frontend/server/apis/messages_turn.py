"""Converts a body of Anthropic's /v1/messages, with its messages and their content blocks, to a
turn of a conversation.

Must not know: the format of the response, HTTP.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....ipc.checks import INT64_MAX
from ....ipc.params import StructuredOutputsParams
from ...text.chat_images import base64_url, image_part, one_content, text_part
from ..http.bodies import checked, known_fields, sent_as
from ..http.call import HttpCall
from ..http.errors import ApiError, invalid, missing, unsupported
from ..state import ServerState
from ..turns.chat_turn import ChatTurn, thinking_variables
from ..turns.response_format import json_options
from ..turns.sampling import sampling_params

# The keys are internal parameter names, and the values the names in this API, for errors.
NAMES = {
    "prompt": "messages",
    "multi_modal_data": "messages",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
}


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


# These fields describe a tool to the model; the values are their names in OpenAI's form.
FUNCTION_KEYS = {
    "name": "name",
    "description": "description",
    "input_schema": "parameters",
    "strict": "strict",
}


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["auto", "any", "tool", "none"]})]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["enabled", "adaptive", "disabled"]})]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["json_schema"]})]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: the fields that determine the prompt."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[SystemBlock] | None = None
    tools: list[Annotated[dict[str, Any], sent_as(AnthropicTool)]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # every prefix is cached


class MessagesBody(PromptBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=INT64_MAX)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    metadata: dict[str, Any] | None = None  # the end user's id; has no effect
    service_tier: str | None = None  # there is only one
    disable_any_whitespace: bool | None = None  # an extension of other servers
    disable_additional_properties: bool | None = None


def turn_of(state: ServerState, call: HttpCall, body: PromptBody, request_id: str) -> ChatTurn:
    """Converts the body to a turn.

    max_tokens is reduced to what the context leaves, as clients expect: the API requires them to
    send one. Raises ApiError, or InvalidParameterError with internal parameter names.
    """
    is_run = isinstance(body, MessagesBody)
    given: dict[str, Any] = {}
    if is_run:
        given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        given["stop"] = body.stop_sequences
    state.check_generates()
    json = json_options(body, state.server_config)
    params = sampling_params(
        state,
        given,
        json,
        max_tokens=body.max_tokens if is_run else None,
        structured_outputs=_structured_outputs(body.output_config),
        streams=body.stream if is_run else False,
    )
    messages = plain_messages(body.system, body.messages, state.reads_images)
    continues = messages[-1]["role"] == "assistant"
    if continues and messages[-1].get("tool_calls"):
        raise invalid(
            "messages",
            "messages: the last message calls tools; their tool_result blocks must follow in a "
            "user message.",
        )
    tools, tool_choice = _tools(body)
    _note_ignored(call, body)
    return ChatTurn(
        request_id,
        messages,
        params,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        template_variables=_variables(state, call, body),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        names=NAMES,
        json=json,
    )


def _structured_outputs(config: OutputConfig | None) -> StructuredOutputsParams | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema":
        raise unsupported(
            "output_config.format.type", "'output_config.format.type' must be json_schema."
        )
    return StructuredOutputsParams(json=config.format.schema)


def _note_ignored(call: HttpCall, body: PromptBody) -> None:
    if body.thinking and body.thinking.budget_tokens is not None:
        call.ignored_params.append("thinking.budget_tokens")
    if isinstance(body, MessagesBody) and body.metadata:
        call.ignored_params.append("metadata")
    if isinstance(body, MessagesBody) and body.service_tier not in (None, "auto", "standard_only"):
        call.ignored_params.append("service_tier")


def _variables(state: ServerState, call: HttpCall, body: PromptBody) -> dict[str, Any]:
    kind = body.thinking and body.thinking.type
    if kind not in (None, "enabled", "adaptive", "disabled"):
        raise unsupported(
            "thinking.type",
            f"'thinking.type' must be enabled, adaptive or disabled, got '{kind:.40}'.",
        )
    enabled = None if kind in (None, "adaptive") else kind == "enabled"
    effort = body.output_config and body.output_config.effort
    return thinking_variables(state, call, enabled, effort, ("thinking", "output_config.effort"))


# ------------------------------------------------------------ tools


def _tools(body: PromptBody) -> tuple[list[dict[str, Any]] | None, Any]:
    """Returns the tools in OpenAI's form, which chat templates expect, and the tool choice."""
    tools = [_tool(tool, i) for i, tool in enumerate(body.tools or [])]
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if (name := tool["function"]["name"]) in names:
            raise invalid(
                f"tools[{i}].name", f"'tools[{i}].name': two tools are called {name!r:.60}."
            )
        names.add(name)
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return None if body.tools is None else tools, "auto"
    if choice.type == "none":
        return None if body.tools is None else tools, "none"
    if choice.type not in ("any", "tool"):
        raise unsupported(
            "tool_choice.type",
            f"'tool_choice.type' must be auto, any, tool or none, got '{choice.type:.40}'.",
        )
    if not tools:
        raise invalid("tool_choice", f"'tool_choice' can be {choice.type} only with 'tools'.")
    if choice.type == "any":
        return tools, "required"
    if choice.name not in names:
        raise invalid("tool_choice.name", "'tool_choice.name' must be the name of one of 'tools'.")
    return tools, {"name": choice.name}


def _tool(sent: dict[str, Any], i: int) -> dict[str, Any]:
    """Converts a tool. It keeps the order of the client's keys, since a template writes them."""
    tool = checked(sent, AnthropicTool, f"tools[{i}]")
    if tool.type not in (None, "custom"):
        message = (
            f"'tools[{i}]', {tool.type:.40}, is a tool of Anthropic's servers; this server "
            f"supports only tools with a name and an input_schema."
        )
        raise unsupported(f"tools[{i}].type", message)
    if not tool.name:
        raise missing(f"tools[{i}].name")
    if tool.input_schema is None:
        raise missing(f"tools[{i}].input_schema")
    function = {
        FUNCTION_KEYS[key]: value
        for key, value in known_fields(sent, AnthropicTool).items()
        if key in FUNCTION_KEYS and value not in ("", False)
    }
    return {"type": "function", "function": function}


# ------------------------------------------------------------ messages

BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")


class AnthropicBlock(msgspec.Struct, tag_field="type", kw_only=True):
    """Base of the content blocks."""

    # It is for Anthropic's prompt cache. Here every prefix is cached.
    cache_control: dict[str, Any] | None = None


class TextBlock(AnthropicBlock, tag="text"):
    text: str
    citations: list[Any] | None = None  # of a response that is sent back; the text contains them


class ThinkingBlock(AnthropicBlock, tag="thinking"):
    thinking: str = ""
    signature: str | None = None


class RedactedThinkingBlock(AnthropicBlock, tag="redacted_thinking"):
    """Reasoning that another server encrypted; only that server can read it."""

    data: str | None = None


class ToolUseBlock(AnthropicBlock, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ImageSource(msgspec.Struct, kw_only=True):
    """`data` of the type base64, or `url` of the type url."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["base64", "url"]})] = ""
    media_type: str | None = None  # the data tell what they are
    data: str | None = None
    url: str | None = None
    file_id: str | None = None  # of the type file: one that was sent to Anthropic; rejected


class ImageBlock(AnthropicBlock, tag="image"):
    source: ImageSource | None = None


class DocumentBlock(AnthropicBlock, tag="document"): ...


class ToolResultBlock(AnthropicBlock, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


AnyBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
)


class SystemBlock(msgspec.Struct, kw_only=True):
    """A TextBlock whose type may be omitted, since no other type is allowed."""

    type: Literal["text"] = "text"
    text: str
    citations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]
    content: str | list[AnyBlock]


def plain_messages(
    system: str | list[SystemBlock] | None,
    said: list[AnthropicMessage],
    reads_images: bool = False,
) -> list[dict[str, Any]]:
    """Returns messages for chat templates. A tool result becomes a message, and reasoning and calls
    belong to the message that contains them.

    Contents are text, or parts if there are images, which only models that read them may have.
    Consecutive messages of the same role are merged, as in Anthropic's API; many templates reject
    them.
    """
    messages: list[dict[str, Any]] = []  # with their contents in parts at first
    if (
        text := system
        if isinstance(system, str)
        else "\n".join(block.text for block in _without_billing(system or []))
    ):
        messages.append({"role": "system", "content": [text_part(text)]})
    if not said:
        raise invalid("messages", "'messages' must have at least one message.", "empty_array")
    calls: set[str] = set()  # their ids
    for i, message in enumerate(said):
        if message.role not in ("user", "assistant", "system"):
            raise invalid(
                f"messages[{i}].role",
                f"'messages[{i}].role' must be user, assistant or system, got "
                f"'{message.role:.40}'.",
            )
        blocks = (
            [TextBlock(text=message.content)]
            if isinstance(message.content, str)
            else message.content
        )
        for j, block in enumerate(blocks):
            where = f"messages[{i}].content[{j}]"
            if isinstance(block, ImageBlock) and message.role == "user":
                _last(messages, "user")["content"].append(_image(block, where, reads_images))
            else:
                _add(messages, message.role, block, where, calls, reads_images)
        if not blocks:
            _last(messages, message.role)
    for message in messages:
        message["content"] = one_content(message["content"])
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def _without_billing(system: list[SystemBlock]) -> list[SystemBlock]:
    """Returns `system` without a first block that Claude Code writes for Anthropic's billing.

    Its value changes between requests, and stands before all else: nothing after it would be found
    in the prefix cache. A model has no use for it.
    """
    has_one = bool(system) and BILLING.fullmatch(system[0].text)
    return system[1:] if has_one else system


def _last(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """Returns the message to append to: the last one if it has this role, else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]


def _add(
    messages: list[dict[str, Any]],
    role: str,
    block: AnyBlock,
    where: str,
    calls: set[str],
    reads_images: bool,
) -> None:
    if isinstance(block, TextBlock):
        _last(messages, role)["content"].append(text_part(block.text))
    elif isinstance(block, ThinkingBlock) and role == "assistant":
        _last(messages, role).setdefault("reasoning_content", []).append(block.thinking)
    elif isinstance(block, ToolUseBlock) and role == "assistant":
        calls.add(block.id)
        call = {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input},
        }
        _last(messages, role).setdefault("tool_calls", []).append(call)
    elif isinstance(block, ToolResultBlock) and role == "user":
        if block.tool_use_id not in calls:
            raise invalid(
                f"{where}.tool_use_id",
                f"'{where}.tool_use_id' must be the id of a tool_use block of an earlier message.",
            )
        content = _result(block, where, reads_images)
        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    elif isinstance(block, DocumentBlock) or (isinstance(block, ImageBlock) and not reads_images):
        raise no_media(where, block, reads_images)
    elif isinstance(block, RedactedThinkingBlock):
        _last(messages, role)
    else:
        raise invalid(
            f"{where}.type",
            f"'{where}' cannot be a {block.__struct_config__.tag} block in a message of the role "
            f"{role}.",
        )


def _result(block: ToolResultBlock, where: str, reads_images: bool) -> list[dict[str, Any]]:
    """Returns the parts of the result of a tool."""
    given = (
        [TextBlock(text=block.content or "")]
        if not isinstance(block.content, list)
        else block.content
    )
    parts: list[dict[str, Any]] = []
    for k, part in enumerate(given):
        place = f"{where}.content[{k}]"
        if isinstance(part, TextBlock):
            parts.append(text_part(part.text))
        elif isinstance(part, ImageBlock):
            parts.append(_image(part, place, reads_images))
        else:
            raise no_media(place, part, reads_images)
    if block.is_error:  # templates have no field for it
        text, others = "", parts
        if parts and parts[0]["type"] == "text":
            text, *others = parts[0]["text"], *parts[1:]
        if not text.lower().startswith("error"):
            parts = [text_part(f"Error: {text}"), *others]
    return parts


def _image(block: ImageBlock, where: str, reads_images: bool) -> dict[str, Any]:
    """Returns the part of an image. Raises ApiError for a model that reads none."""
    if not reads_images:
        raise no_media(where, block, reads_images)
    source, place = block.source, f"{where}.source"
    if source is None:
        raise missing(place)
    if source.type not in ("base64", "url"):
        raise unsupported(
            f"{place}.type",
            f"'{place}.type' must be base64 or url, got {source.type!r:.40}: this server has no "
            f"files.",
        )
    if source.type == "url":
        return image_part(_given(source.url, f"{place}.url"), f"{place}.url")
    return image_part(base64_url(_given(source.data, f"{place}.data")), f"{place}.data")


def _given(value: str | None, where: str) -> str:
    if value is None:
        raise missing(where)
    return value


def no_media(where: str, block: AnthropicBlock, reads_images: bool) -> ApiError:
    reads = "text and images" if reads_images else "text"
    return unsupported(
        f"{where}.type",
        f"'{where}' is of the type {block.__struct_config__.tag}: this model reads {reads} only.",
    )
