"""The messages of OpenAI's chat: checked by role, and brought into the form that chat templates expect.
May know: the shapes of OpenAI's messages, what templates on the hub read.
Must not know: any template, tokens, the engine."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .call import Call
from .errors import invalid, missing, unsupported
from .response_format import check_name

NO_FUNCTION_CALL = "'function_call' is the old form of tool calls; send 'tool_calls'."


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message. Only text can be read by this server's models."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


Content = str | Annotated[list[ContentPart], Meta(min_length=1)]


class FunctionCallParam(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any]


class ToolCallParam(msgspec.Struct, kw_only=True):
    function: FunctionCallParam
    id: str | None = None
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})] = "function"
    index: int | None = None  # clients send back what a stream gave them


class SystemMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class DeveloperMessage(SystemMessage, kw_only=True, tag_field="role", tag="developer"):
    """What newer models call the system message. Templates that do not speak of it get a system message."""


class UserMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="user"):
    content: Content
    name: str | None = None


class AssistantMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="assistant"):
    """`content`, `tool_calls` or both. A message of this server's own can be sent back as it came."""

    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class ToolMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: str
    name: str | None = None


class FunctionMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="function"):
    """The old form of a tool's answer. Refused."""

    content: str | None = None
    name: str | None = None


Message = DeveloperMessage | SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


def for_template(messages: list[Message], call: Call, template: str, *, at: str = "messages") -> list[dict[str, Any]]:
    """Plain dicts with text contents and without what was not said. Raises ApiError with the path of what is wrong."""
    rendered = []
    for i, message in enumerate(messages):
        where = f"{at}[{i}]"
        if isinstance(message, FunctionMessage):
            raise unsupported(f"{where}.role", "Messages of the role 'function' are the old form of the role 'tool'; send that.")
        if isinstance(message, AssistantMessage):
            rendered.append(_assistant(message, where))
            continue
        fields: dict[str, Any] = {"role": message.__struct_config__.tag, "content": _text(message.content, where, call)}
        if isinstance(message, DeveloperMessage) and "developer" not in template:
            fields["role"] = "system"
        if isinstance(message, ToolMessage):
            fields["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            fields["name"] = message.name
        rendered.append(fields)
    return rendered


def _assistant(message: AssistantMessage, where: str) -> dict[str, Any]:
    if message.function_call is not None:
        raise unsupported(f"{where}.function_call", NO_FUNCTION_CALL)
    if message.audio is not None:
        raise unsupported(f"{where}.audio", "This model reads text only: a message cannot refer to audio.")
    content = message.content if message.content is not None else message.refusal
    if content is None and not message.tool_calls and message.reasoning_content is None and message.reasoning is None:
        raise missing(f"{where}.content")
    # Templates put `content` into text: null would be written out as None.
    fields: dict[str, Any] = {"role": "assistant", "content": "" if content is None else _text(content, where)}
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return fields


def _tool_call(call: ToolCallParam, where: str) -> dict[str, Any]:
    """The API writes arguments as JSON text, templates want them as an object."""
    if call.type != "function":
        raise unsupported(f"{where}.type", f"'{where}.type' must be \"function\", got {call.type!r:.40}.")
    check_name(call.function.name, f"{where}.function.name")
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            path = f"{where}.function.arguments"
            raise invalid(path, f"'{path}' must be a JSON object as text.") from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


def _text(content: Content, where: str, call: Call | None = None) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        path = f"{where}.content[{i}]"
        if part.type == "refusal" and call is None:
            texts.append(_required(part.refusal, f"{path}.refusal"))
        elif part.type == "text":
            texts.append(_required(part.text, f"{path}.text"))
        else:
            raise unsupported(f"{path}.type", f"This model reads text only: a content part of type {part.type!r:.40} is not supported.")
        if part.prompt_cache_breakpoint is not None and call is not None:
            call.ignored_params.append(f"{path}.prompt_cache_breakpoint")
    return "\n".join(texts)


def _required(text: str | None, path: str) -> str:
    if text is None:
        raise missing(path)
    return text
