"""Images in the messages of a conversation: their parts in one form, and their order.

Must not know: pixels, how an image is read or fetched, templates.

    {"type": "image_url", ...}  ──normalize──▶  {"type": "image", "image": PlacedImage}
                                ──for a template──▶  {"type": "image"}, or the model's placeholder
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...ipc.checks import require_kind, shown
from ...ipc.errors import InvalidParameterError

Messages = list[dict[str, Any]]
ROLES = ("user", "tool")  # of messages that may have images
# type of a part -> the key of its image
IMAGE_KEYS = {
    "image_url": "image_url",
    "input_image": "image_url",
    "image": "image",
    "image_pil": "image_pil",
}


class PlacedImage(NamedTuple):
    """An image of a message."""

    picture: Any  # what frontend/images reads: pixels, the bytes of a file, a URL
    place: str  # in the messages, such as messages[1].content[2].image_url.url
    uuid: str | None = None


def kind_of(part: dict[str, Any]) -> Any:
    """Returns the type of a part. It may be omitted where a key tells it."""
    return part.get("type") or next((key for key in IMAGE_KEYS if key in part), "text")


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(picture: Any, place: str, uuid: str | None = None) -> dict[str, Any]:
    return {"type": "image", "image": PlacedImage(picture, place, uuid)}


def one_content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns the content of a message: its texts joined with newlines, as in vLLM, or the parts if
    there are images.
    """
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def read_image_part(part: dict[str, Any], kind: str, path: str) -> dict[str, Any]:
    """Returns the part of an image in the one form. Raises InvalidParameterError for a part without
    its image.
    """
    key = IMAGE_KEYS[kind]
    picture, place = part.get(key), f"{path}.{key}"
    if isinstance(picture, PlacedImage):
        return part
    if kind == "image" and picture is None:
        picture, place = part.get("url"), f"{path}.url"
    if key == "image_url" and isinstance(picture, dict):
        picture, place = picture.get("url"), f"{place}.url"
    if picture is None and part.get("file_id") is not None:
        raise InvalidParameterError(
            f"{path}.file_id", "refers to a file of OpenAI's; send the image in image_url"
        )
    if key == "image_url":
        require_kind(isinstance(picture, str), place, "a URL", picture)
    require_kind(picture is not None, place, "an image", picture)
    uuid = part.get("uuid")
    require_kind(uuid is None or isinstance(uuid, str), f"{path}.uuid", "a string", uuid)
    return image_part(picture, place, uuid)


def check_role(role: str, content: Any, path: str) -> None:
    """Raises InvalidParameterError for an image in a message that cannot have one."""
    if isinstance(content, list) and role not in ROLES:
        raise InvalidParameterError(
            path, f"cannot have an image: it is a message of the role {shown(role)}"
        )


def images_of(messages: Messages) -> list[PlacedImage]:
    """Returns the images of normalized messages, in the order in which they stand."""
    return [
        part["image"]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image"
    ]


def joined(contents: list[Any], separator: str) -> Any:
    """Joins contents, each text or parts: text if all are, otherwise parts."""
    contents = [content for content in contents if content]
    if all(isinstance(content, str) for content in contents):
        return separator.join(contents)
    parts: list[dict[str, Any]] = []
    for i, content in enumerate(contents):
        text = [text_part(separator)] if i else []
        parts += text + as_parts(content)
    return parts


def as_parts(content: Any) -> list[dict[str, Any]]:
    """Returns the content as a list of parts."""
    return content if isinstance(content, list) else [text_part(content)]


def with_text_parts(messages: Messages) -> Messages:
    """Serves templates that read the parts of a content and not its text."""
    return [{**m, "content": as_parts(m["content"])} if "content" in m else m for m in messages]


def with_parts_for_images(
    messages: Messages, roles: frozenset[str], placeholder: str, in_parts: bool
) -> Messages:
    """Replaces each image by a part without it, for templates that write a placeholder for such a
    part of a message of these `roles`. In other messages the placeholder stands in the text, which
    is a part with `in_parts`.
    """
    shown: Messages = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and message["role"] in roles:
            content = [{"type": "image"} if p["type"] == "image" else p for p in content]
        elif isinstance(content, list):
            texts = [placeholder if p["type"] == "image" else p["text"] for p in content]
            content = "\n".join(texts)
            content = as_parts(content) if in_parts else content
        shown.append({**message, "content": content} if "content" in message else message)
    return shown


def with_literal(value: Any, placeholder: str) -> Any:
    """Returns messages, tools or documents in which no text has the placeholder, so that a user's
    text never stands for an image: a zero-width space follows its first character. Raises
    InvalidParameterError for values that are nested too deeply.
    """
    broken = f"{placeholder[:1]}\u200b{placeholder[1:]}"

    def literal(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(placeholder, broken)
        if isinstance(value, dict):
            return {key: literal(one) for key, one in value.items()}
        return [literal(one) for one in value] if isinstance(value, list) else value

    try:
        return literal(value)
    except RecursionError:
        raise InvalidParameterError("messages", "or tools are nested too deeply") from None


def base64_url(data: str) -> str:
    """Returns the data URL of an image that is given in base64 alone. The image itself tells its
    format.
    """
    return f"data:image;base64,{data}"


def num_characters_of(messages: Any) -> int:
    """Returns how long the texts of messages are, which need not be valid."""
    count = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            count += len(text) if isinstance(text, str) else 0
    return count
