"""Converts messages of Anthropic's API and their content blocks to messages for chat templates.

Must not know: the other fields of a body, HTTP.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..http.errors import ApiError, invalid, unsupported

BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")


class AnthropicBlock(msgspec.Struct, tag_field="type", kw_only=True):
    """Base of the content blocks."""

    # for Anthropic's prompt cache; here every prefix is cached
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


class ImageBlock(AnthropicBlock, tag="image"): ...


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
    system: str | list[SystemBlock] | None, said: list[AnthropicMessage]
) -> list[dict[str, Any]]:
    """Messages for chat templates: a tool result becomes a message; reasoning and calls belong to
    the message that contains them.

    Consecutive messages of the same role are merged, as in Anthropic's API; many templates reject
    them.
    """
    messages: list[dict[str, Any]] = []  # with their texts in pieces at first
    if (
        text := system
        if isinstance(system, str)
        else "\n".join(block.text for block in _without_billing(system or []))
    ):
        messages.append({"role": "system", "content": [text]})
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
            _add(messages, message.role, block, f"messages[{i}].content[{j}]", calls)
        if not blocks:
            _last(messages, message.role)
    for message in messages:
        message["content"] = "\n".join(message["content"])
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def _without_billing(system: list[SystemBlock]) -> list[SystemBlock]:
    """`system` without a first block that Claude Code writes for Anthropic's billing.

    Its value changes between requests, and stands before all else: nothing after it would be found
    in the prefix cache. A model has no use for it.
    """
    has_one = bool(system) and BILLING.fullmatch(system[0].text)
    return system[1:] if has_one else system


def _last(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The message to append to: the last one if it has this role, else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]


def _add(
    messages: list[dict[str, Any]], role: str, block: AnyBlock, where: str, calls: set[str]
) -> None:
    if isinstance(block, TextBlock):
        _last(messages, role)["content"].append(block.text)
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
        content = [_result_text(block, where)]
        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    elif isinstance(block, (ImageBlock, DocumentBlock)):
        raise no_media(where, block)
    elif isinstance(block, RedactedThinkingBlock):
        _last(messages, role)
    else:
        raise invalid(
            f"{where}.type",
            f"'{where}' cannot be a {block.__struct_config__.tag} block in a message of the role "
            f"{role}.",
        )


def _result_text(block: ToolResultBlock, where: str) -> str:
    parts = (
        [TextBlock(text=block.content or "")]
        if not isinstance(block.content, list)
        else block.content
    )
    texts: list[str] = []
    for k, part in enumerate(parts):
        if not isinstance(part, TextBlock):
            raise no_media(f"{where}.content[{k}]", part)
        texts.append(part.text)
    text = "\n".join(texts)
    # templates have no field for errors
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text


def no_media(where: str, block: AnthropicBlock) -> ApiError:
    return unsupported(
        f"{where}.type",
        f"'{where}' is of the type {block.__struct_config__.tag}: this model reads text only.",
    )
