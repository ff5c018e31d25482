"""Converts the messages of a conversation into the form that chat templates expect.

Must not know: jinja2, specific models, requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from ...ipc.checks import require_kind, shown
from ...ipc.errors import InvalidParameterError
from .chat_images import (
    IMAGE_KEYS,
    check_role,
    joined,
    kind_of,
    one_content,
    read_image_part,
    text_part,
)

# type of a part -> the key of its text
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
INSTRUCTING = ("system", "developer")  # roles
SHORT_ID_LENGTH = 9  # required by Mistral's templates


def normalize_messages(messages: Any, *, reads_images: bool = False) -> list[dict[str, Any]]:
    """Returns copies of the messages in one form: no keys whose value is None, content as text,
    arguments of tool calls as dicts if they are JSON, and reasoning of earlier turns under both of
    its names. A content with images, which only models that read images may have, is a list of
    parts of the types "text" and "image", each of these with its PlacedImage.

    Templates treat a missing key as empty, as in transformers. They would render None as "None".

    Raises InvalidParameterError that names the place, such as
    messages[2].tool_calls[0].function.name.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidParameterError("messages", "must be a list of at least one message")
    normalized: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        require_kind(isinstance(message, dict), path, "an object with a `role`", message)
        role = message.get("role")
        require_kind(isinstance(role, str), f"{path}.role", "a string", role)
        copy = {key: value for key, value in message.items() if value is not None}
        if "content" in copy:
            content = _content(copy["content"], f"{path}.content", reads_images)
            check_role(role, content, f"{path}.content")
            copy["content"] = content
        if copy.get("tool_calls"):
            copy["tool_calls"] = _tool_calls(copy["tool_calls"], f"{path}.tool_calls")
        elif "tool_calls" in copy:
            del copy["tool_calls"]  # []: templates test whether the key exists
        if isinstance(reasoning := copy.get("reasoning_content", copy.get("reasoning")), str):
            copy["reasoning_content"] = copy["reasoning"] = reasoning
        normalized.append(copy)
    return normalized


def _content(content: Any, path: str, reads_images: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    require_kind(isinstance(content, list), path, "a string, null or a list of parts", content)
    return one_content(
        [_part(part, f"{path}[{i}]", reads_images) for i, part in enumerate(content)]
    )


def _part(part: Any, path: str, reads_images: bool) -> dict[str, Any]:
    text = part
    if isinstance(part, dict):
        kind = kind_of(part)
        is_known = isinstance(kind, str) and kind in TEXT_KEYS
        text = part.get(TEXT_KEYS[kind]) if is_known else None
        if reads_images and isinstance(kind, str) and kind in IMAGE_KEYS:
            return read_image_part(part, kind, path)
    if not isinstance(text, str):
        kinds = "text with its `text`: this model reads text only"
        if reads_images:
            kinds = "text with its `text`, or an image"
        raise InvalidParameterError(path, f"must be a part of type {kinds}; got {shown(part)}")
    return text_part(text)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    require_kind(isinstance(calls, list), path, "a list", calls)
    normalized = []
    for i, call in enumerate(calls):
        function: Any = call.get("function") if isinstance(call, dict) else None
        place = f"{path}[{i}].function"
        kind = "an object with `name` and `arguments`"
        require_kind(isinstance(function, dict), place, kind, function)
        name = function.get("name")
        require_kind(isinstance(name, str), f"{place}.name", "a string", name)
        arguments = _arguments(function.get("arguments"), f"{place}.arguments")
        normalized.append(
            {**call, "type": "function", "function": {**function, "arguments": arguments}}
        )
    return normalized


def _arguments(arguments: Any, path: str) -> dict[str, Any] | str:
    """Parses the arguments. A model may have produced arguments that are not JSON; they are kept as
    text.
    """
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    require_kind(isinstance(arguments, str), path, "JSON text", arguments)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


# ---------------------------------------------------------------- what only some templates need


def with_arguments_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that concatenate the arguments with text."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        {**m, "tool_calls": [as_text(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]


def with_empty_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that fail on a message without content."""
    return [m if "content" in m else {**m, "content": ""} for m in messages]


def with_result_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that fail on a tool result without the name of its function."""
    names: dict[str, str] = {}  # id of a call -> name of its function
    named = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        is_nameless = message["role"] == "tool" and "name" not in message
        if is_nameless and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        named.append(message)
    return named


def with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that accept only ids in Mistral's form."""

    def short(identifier: Any) -> str:
        return re.sub(r"[^A-Za-z0-9]", "", str(identifier))[-SHORT_ID_LENGTH:].rjust(
            SHORT_ID_LENGTH, "0"
        )

    shortened = []
    for message in messages:
        copy = dict(message)
        if "tool_calls" in copy:
            copy["tool_calls"] = [
                {**call, "id": short(call.get("id", i))}
                for i, call in enumerate(copy["tool_calls"])
            ]
        if "tool_call_id" in copy:
            copy["tool_call_id"] = short(copy["tool_call_id"])
        shortened.append(copy)
    return shortened


def with_function_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that write the id of a call and not its function: the ids become
    functions.NAME:INDEX, with an index that counts on through the conversation, as Kimi's models
    write them.
    """
    renamed = []
    names: dict[str, str] = {}  # id of a call -> its new id
    num_calls = 0
    for message in messages:
        copy = dict(message)
        if "tool_calls" in copy:
            calls = []
            for call in copy["tool_calls"]:
                own = f"functions.{call['function']['name']}:{num_calls}"
                num_calls += 1
                if "id" in call:
                    names[call["id"]] = own
                calls.append({**call, "id": own})
            copy["tool_calls"] = calls
        if copy.get("tool_call_id") in names:
            copy["tool_call_id"] = names[copy["tool_call_id"]]
        renamed.append(copy)
    return renamed


def with_system_for_developer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that do not support OpenAI's newer role name."""
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def further_instructions(messages: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields the place and role of each instruction that is not the first message. The place is
    "leading" if only instructions stand before it, otherwise "late".
    """
    place = "leading"
    for i, message in enumerate(messages):
        if message["role"] not in INSTRUCTING:
            place = "late"
        elif i > 0:
            yield place, message["role"]


def with_one_instruction(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that refuse or drop further system messages: all of them become one."""
    instructions = [m for m in messages if m["role"] in INSTRUCTING]
    if not instructions:
        return messages
    text = "\n\n".join(m["content"] for m in instructions if m.get("content"))
    others = [m for m in messages if m["role"] not in INSTRUCTING]
    return [{**instructions[0], "content": text}, *others]


def with_instruction_for_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that refuse all system messages: the user's first message begins with the
    text.
    """
    if not any(m["role"] in INSTRUCTING and m.get("content") for m in messages):
        return messages
    system, *others = with_one_instruction(messages)
    for i, message in enumerate(others):
        if message["role"] == "user":
            content = joined([system["content"], message.get("content")], "\n\n")
            return [*others[:i], {**message, "content": content}, *others[i + 1 :]]
    return [{"role": "user", "content": system["content"]}, *others]


def with_joined_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates in which user and assistant must alternate: neighbouring messages of the
    user become one, as in Anthropic's API.
    """
    merged: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "user" and merged and merged[-1]["role"] == "user":
            contents = [merged[-1].get("content"), message.get("content")]
            merged[-1] = {**merged[-1], "content": joined(contents, "\n\n")}
        else:
            merged.append(message)
    return merged


def with_one_call(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that write only the first call of a message: each call gets a message of its
    own, followed by its result.
    """
    split: list[dict[str, Any]] = []
    i = 0
    while i < len(messages):
        message = messages[i]
        calls = message.get("tool_calls", ())
        i += 1
        if len(calls) < 2:
            split.append(message)
            continue
        results = list(takewhile(lambda m: m["role"] == "tool", messages[i:]))
        i += len(results)
        for call in calls:
            split.append({**message, "tool_calls": [call]})
            message = {"role": message["role"]}
            own = results[:1]  # without ids they have the order of the calls
            if "id" in call:
                own = [r for r in results if r.get("tool_call_id") == call["id"]]
            split += own
            results = [r for r in results if r not in own]
        split += results
    return split


def with_thinking(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that read reasoning as `thinking`."""
    return [
        {"content": "", "thinking": m["reasoning_content"], **m}
        if "reasoning_content" in m and m["role"] == "assistant"
        else m
        for m in messages
    ]


def with_content_as_thinking(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that refuse a message with calls, content and `thinking`."""
    return [
        {**m, "content": "", "thinking": f"{m['thinking']}\n{m['content']}"}
        if "tool_calls" in m and m.get("thinking") and m.get("content")
        else m
        for m in messages
    ]


def with_results_as_json(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that write results of tools as JSON. They would quote text that is JSON."""

    def value(content: Any) -> Any:
        if not isinstance(content, str):
            return content  # with images
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return content
        return found if isinstance(found, (dict, list)) else content

    return [
        {**m, "content": value(m["content"])} if m["role"] == "tool" and "content" in m else m
        for m in messages
    ]


def with_descriptions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Serves templates that fail on a tool without a description."""
    return [
        {**t, "function": {**t["function"], "description": t["function"].get("description", "")}}
        for t in tools
    ]
