"""The items of OpenAI's Responses API, which are the steps of a conversation, as messages for chat
templates.

Must not know: the other fields of a body, where responses are stored, HTTP.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from ...text.chat_images import check_role, image_part, joined, one_content, text_part
from ..http.errors import ApiError, invalid, missing, unsupported
from .responses_tools import INPUT, called_name

ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
# A conversation with its stored items has the limit of `input` (http/bodies.py), by `num_parts`:
# reading them takes time on the event loop.
MAX_CONVERSATION = 50_000


# A summary that this server wrote begins with this mark. Another server's are encrypted.
SUMMARY_MARK = "quire-summary:"


class ItemPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A piece of content: input_text, input_image, output_text, refusal, reasoning_text or
    summary_text.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    image_url: str | None = None
    file_id: str | None = None  # a file of OpenAI's; rejected
    detail: str | None = None  # images are read in the size that the model takes


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One step of a conversation: a message, a call, its result, or reasoning.

    Fields that a type does not have are None.
    """

    type: str | None = None  # None: a message
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of the called tool
    arguments: str | None = None
    input: str | None = None  # of a custom tool
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None
    phase: str | None = None


def num_parts(item: Item) -> int:
    """Counts 1 for the item, and 1 for each of its parts."""
    parts = (item.content, item.output, item.summary)
    return 1 + sum(len(part) for part in parts if isinstance(part, list))


def too_long(param: str) -> ApiError:
    return invalid(
        param,
        f"'{param}': the conversation may have at most {MAX_CONVERSATION} items and parts of items "
        f"with those that are stored.",
        "array_above_max_length",
    )


def items_of(input: str | list[Item] | None) -> list[Item]:
    """Returns the new items, each with an id."""
    if input is None:
        raise missing("input")
    items = [Item(role="user", content=input)] if isinstance(input, str) else input
    for item in items:
        item.type = item.type or "message"
        if item.type == "message" and isinstance(item.content, str):
            item.content = [
                ItemPart(
                    type="output_text" if item.role == "assistant" else "input_text",
                    text=item.content,
                )
            ]
        item.id = item.id or f"{ID_PREFIXES.get(item.type, 'item')}_{secrets.token_hex(16)}"
    return items


def messages_of(
    instructions: str | None,
    items: list[Item],
    num_earlier: int = 0,
    earlier: str = "previous_response_id",
    *,
    reads_images: bool = False,
) -> list[dict[str, Any]]:
    """Returns messages for chat templates. Reasoning and calls are merged into the adjacent
    assistant message. Contents are text, or parts if there are images, which only models that read
    them may have.

    The first `num_earlier` items do not come from the body's `input` but from what its field
    `earlier` refers to.
    """
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": instructions}] if instructions else []
    )
    calls: set[str] = set()  # their ids
    for i, item in enumerate(items):
        _add(
            messages,
            item,
            f"input[{i - num_earlier}]" if i >= num_earlier else earlier,
            calls,
            reads_images,
        )
    if not items:
        raise invalid("input", "'input' must have at least one item.", "empty_array")
    num_system = next(
        (i for i, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    if num_system > 1:  # many templates accept only one system message
        messages[:num_system] = [
            {
                "role": "system",
                "content": "\n".join(message["content"] for message in messages[:num_system]),
            }
        ]
    return messages


def _required(value: str | None, where: str) -> str:
    """Raises ApiError 400 if `value` is missing or empty."""
    if not value:
        raise missing(where)
    return value


def _add(
    messages: list[dict[str, Any]], item: Item, where: str, calls: set[str], reads_images: bool
) -> None:
    last: dict[str, Any] = messages[-1] if messages else {"role": ""}
    if item.type == "message":
        _add_message(messages, last, item, where, reads_images)
    elif item.type == "reasoning":
        thought = "\n".join(
            part.text or ""
            for part in (item.content if isinstance(item.content, list) else None)
            or item.summary
            or []
        )
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif item.type in ("function_call", "custom_tool_call"):
        call_id = _required(item.call_id, f"{where}.call_id")
        name = called_name(_required(item.name, f"{where}.name"), item.namespace)
        calls.add(call_id)
        if last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        function = {"name": name, "arguments": _arguments(item, where)}
        last.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": function}
        )
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        if item.call_id is None or item.call_id not in calls:
            raise invalid(f"{where}.call_id", f"'{where}.call_id' must be that of an earlier call.")
        if item.output is None:
            raise missing(f"{where}.output")
        content = _content(item.output, f"{where}.output", reads_images)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif item.type == "compaction":
        text = item.encrypted_content or ""
        if not text.startswith(SUMMARY_MARK):
            raise invalid(
                f"{where}.encrypted_content",
                f"'{where}.encrypted_content' is not from this server's /v1/responses/compact.",
            )
        summary = f"Summary of the conversation so far:\n{text.removeprefix(SUMMARY_MARK)}"
        if last["role"] == "user":
            last["content"] = joined([last["content"], summary], "\n\n")
        else:
            messages.append({"role": "user", "content": summary})
    else:
        message = (
            f"'{where}' is of the type {item.type!r:.40}; this server supports message, reasoning, "
            f"and the calls and outputs of functions and custom tools."
        )
        raise unsupported(f"{where}.type", message)


def _add_message(
    messages: list[dict[str, Any]],
    last: dict[str, Any],
    item: Item,
    where: str,
    reads_images: bool,
) -> None:
    if item.role not in ("user", "assistant", "system", "developer"):
        raise invalid(
            f"{where}.role", f"'{where}.role' must be user, assistant, system or developer."
        )
    if item.content is None:
        raise missing(f"{where}.content")
    content = _content(item.content, f"{where}.content", reads_images)
    check_role(item.role, content, f"{where}.content")
    role = "system" if item.role == "developer" else item.role  # templates use the older name
    if (
        role == "assistant"
        and last["role"] == "assistant"
        and not last["content"]
        and "tool_calls" not in last
    ):
        last["content"] = content  # belongs to the preceding reasoning
    else:
        messages.append({"role": role, "content": content})


def _arguments(item: Item, where: str) -> dict[str, Any]:
    if item.type == "custom_tool_call":
        if item.input is None:
            raise missing(f"{where}.input")
        return {INPUT: item.input}
    try:
        found = msgspec.json.decode(_required(item.arguments, f"{where}.arguments"))
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, dict):
        path = f"{where}.arguments"
        raise invalid(path, f"'{path}' must be the JSON text of an object.")
    return found


def _content(
    content: str | list[ItemPart], where: str, reads_images: bool
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = []
    for j, part in enumerate(content):
        place = f"{where}[{j}]"
        if part.type == "input_image" and reads_images:
            parts.append(_image(part, place))
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("input_text", "output_text", "text", "refusal"):
            reads = "text and images" if reads_images else "text"
            raise unsupported(
                f"{place}.type",
                f"'{place}' is of the type {part.type!r:.40}: this model reads {reads} only.",
            )
        if text is None:
            raise missing(f"{place}.{'refusal' if part.type == 'refusal' else 'text'}")
        parts.append(text_part(text))
    return one_content(parts)


def _image(part: ItemPart, place: str) -> dict[str, Any]:
    if part.image_url is None and part.file_id is not None:
        raise unsupported(
            f"{place}.file_id", f"'{place}' is a file of OpenAI's; send the image in 'image_url'."
        )
    return image_part(_required(part.image_url, f"{place}.image_url"), f"{place}.image_url")
