"""The messages of OpenAI's chat API: their types by role, and which of their parts are unsupported.

Must not know: what a template makes of them (frontend/text/chat_messages.py), tokens, the engine.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...text.chat_images import image_part, one_content, text_part
from ..http.call import HttpCall
from ..http.errors import invalid, missing, unsupported
from ..turns.response_format import check_name


class ImageUrl(msgspec.Struct, kw_only=True):
    url: str
    detail: str | None = None  # images are read in the size that the model takes


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message. Models that read images take those too."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal", "image_url"]})]
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None
    uuid: str | None = None  # vLLM's id of an image, which is found by its content here
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


MessageContent = str | Annotated[list[ContentPart], Meta(min_length=1)]


class FunctionCallParam(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any]


class ToolCallParam(msgspec.Struct, kw_only=True):
    function: FunctionCallParam | None = None
    id: str | None = None
    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})] = "function"
    index: int | None = None  # present when clients send back what a stream sent
    custom: dict[str, Any] | None = None  # OpenAI's custom tools; rejected


class SystemMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="system"):
    content: MessageContent
    name: str | None = None


class DeveloperMessage(SystemMessage, kw_only=True, tag_field="role", tag="developer"):
    """The name of the system message for newer models."""


class UserMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="user"):
    content: MessageContent
    name: str | None = None


class AssistantMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="assistant"):
    """`content`, `tool_calls` or both.

    A message from this server's response can be sent back unmodified.
    """

    content: MessageContent | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


class ToolMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="tool"):
    content: MessageContent
    tool_call_id: str
    name: str | None = None


class FunctionMessage(msgspec.Struct, kw_only=True, tag_field="role", tag="function"):
    """The deprecated form of a tool message. Rejected."""

    content: str | None = None
    name: str | None = None


OpenAIMessage = (
    DeveloperMessage
    | SystemMessage
    | UserMessage
    | AssistantMessage
    | ToolMessage
    | FunctionMessage
)


def plain_messages(
    messages: list[OpenAIMessage], call: HttpCall, reads_images: bool = False
) -> list[dict[str, Any]]:
    """Returns the messages for ChatTurn, as dicts without absent fields. Their contents are text,
    or parts if there are images, which only models that read them may have.

    Raises ApiError with the path of the invalid field.
    """
    if not messages:
        raise invalid("messages", "'messages' must have at least one message.", "empty_array")
    plain = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if isinstance(message, FunctionMessage):
            raise unsupported(
                f"{where}.role",
                "The role 'function' is deprecated; use 'tool'.",
            )
        if isinstance(message, AssistantMessage):
            plain.append(_assistant(message, where, call, reads_images))
            continue
        fields: dict[str, Any] = {
            "role": message.__struct_config__.tag,
            "content": _content(message, where, call, reads_images),
        }
        if isinstance(message, ToolMessage):
            fields["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            fields["name"] = message.name
        plain.append(fields)
    return plain


def _assistant(
    message: AssistantMessage, where: str, call: HttpCall, reads_images: bool
) -> dict[str, Any]:
    if message.function_call is not None:
        raise unsupported(
            f"{where}.function_call",
            "'function_call' is deprecated; use 'tool_calls'.",
        )
    if message.audio is not None:
        raise unsupported(
            f"{where}.audio", "This model reads text only: a message cannot refer to audio."
        )
    has_content = message.content is not None or message.refusal is not None
    reasoning = (
        message.reasoning_content if message.reasoning_content is not None else message.reasoning
    )
    if not has_content and reasoning is None and not message.tool_calls:
        raise missing(f"{where}.content")
    fields: dict[str, Any] = {
        "role": "assistant",
        "content": _content(message, where, call, reads_images) if has_content else None,
    }
    if not has_content and not message.tool_calls:
        fields["content"] = ""
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [
            _tool_call(made, f"{where}.tool_calls[{i}]")
            for i, made in enumerate(message.tool_calls)
        ]
    return fields


def _tool_call(made: ToolCallParam, where: str) -> dict[str, Any]:
    if made.type != "function":
        raise unsupported(
            f"{where}.type", f"'{where}.type' must be \"function\", got {made.type!r:.40}."
        )
    if made.function is None:
        raise missing(f"{where}.function")
    check_name(made.function.name, f"{where}.function.name")
    function = {"name": made.function.name, "arguments": made.function.arguments}
    return {"type": "function", "function": function} | ({} if made.id is None else {"id": made.id})


def _content(
    message: SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    where: str,
    call: HttpCall,
    reads_images: bool,
) -> str | list[dict[str, Any]]:
    content, may_refuse = message.content, isinstance(message, AssistantMessage)
    if content is None and isinstance(message, AssistantMessage):
        content = message.refusal
    if content is None:
        return ""
    may_show = isinstance(message, (UserMessage, ToolMessage))
    return plain_content(content, where, call, reads_images, may_show, may_refuse)


def plain_content(
    content: MessageContent,
    where: str,
    call: HttpCall,
    reads_images: bool,
    may_show: bool = True,
    may_refuse: bool = False,
) -> str | list[dict[str, Any]]:
    """Returns the content of a message at the path `where`, which may have images or refusals or
    not: text, or parts if there are images. Raises ApiError with the path of the invalid field.
    """
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        path = f"{where}.content[{i}]"
        if part.type == "refusal" and may_refuse:
            parts.append(text_part(_required(part.refusal, f"{path}.refusal")))
        elif part.type == "text":
            parts.append(text_part(_required(part.text, f"{path}.text")))
        elif part.type == "image_url" and reads_images:
            if not may_show:
                problem = "Only messages of the user and results of tools can have images."
                raise unsupported(f"{path}.type", problem)
            parts.append(_image(part, path, call))
        else:
            reads = "text and images" if reads_images else "text"
            raise unsupported(
                f"{path}.type",
                f"This model reads {reads} only: a content part of type {part.type!r:.40} is not "
                f"supported.",
            )
        if part.prompt_cache_breakpoint is not None:
            call.ignored_params.append(f"{path}.prompt_cache_breakpoint")
    return one_content(parts)


def _image(part: ContentPart, path: str, call: HttpCall) -> dict[str, Any]:
    url, place = part.image_url, f"{path}.image_url"
    if url is None:
        raise missing(place)
    if isinstance(url, ImageUrl):
        if url.detail not in (None, "auto"):
            call.ignored_params.append(f"{place}.detail")
        url, place = url.url, f"{place}.url"
    if part.uuid is not None:
        call.ignored_params.append(f"{path}.uuid")
    return image_part(url, place, part.uuid)


def _required(text: str | None, path: str) -> str:
    if text is None:
        raise missing(path)
    return text
