"""Detects what a chat template supports of tools and tool calls by rendering a small conversation.

Must not know: jinja2, how a template is rendered (chat_template.py passes that in), markers of any
model.

Templates differ in what they read: arguments as an object or as text, no content or empty content
in messages with calls, any id or only ids of one form. A wrong assumption fails or writes Python's
None into the prompt. Rendering is more reliable than searching the template's text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .chat_messages import (
    with_arguments_as_text,
    with_empty_content,
    with_short_ids,
    with_system_for_developer,
)

Render = Callable[..., str]
Messages = list[dict[str, Any]]

PROBE_SCHEMA = {
    "type": "object",
    "properties": {"probe_key": {"type": "string", "description": "Probed."}},
    "required": ["probe_key"],
}
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe_function", "description": "Probes.", "parameters": PROBE_SCHEMA},
}
PROBE_ID = "call_0123456789abcdef01234567"
PROBE_CALL = {
    "id": PROBE_ID,
    "type": "function",
    "function": {"name": "probe_function", "arguments": {"probe_key": "probe value"}},
}
USER = {"role": "user", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALLING = {"role": "assistant", "tool_calls": [PROBE_CALL]}


@dataclass(frozen=True)
class TemplateTraits:
    takes_tools: bool  # it writes the tools into the prompt
    writes_calls: bool  # it writes the calls of earlier turns
    arguments_as_text: bool = False
    empty_content: bool = False
    short_ids: bool = False
    knows_developer: bool = True
    takes_several_calls: bool = True  # in one turn

    def adapt(self, messages: Messages) -> Messages:
        """Converts normalized messages to the form that this template reads."""
        if self.arguments_as_text:
            messages = with_arguments_as_text(messages)
        if self.empty_content:
            messages = with_empty_content(messages)
        if self.short_ids:
            messages = with_short_ids(messages)
        return messages if self.knows_developer else with_system_for_developer(messages)


def find_traits(template: str, render: Render) -> TemplateTraits:
    """`render(messages, tools)` returns the prompt, and may raise any exception."""

    def attempt(messages: Messages, tools: list[dict] | None = None) -> str:
        try:
            return render(messages, tools)
        except Exception:
            return ""

    takes_tools = any(
        "probe_function" in attempt(messages, [PROBE_TOOL]) for messages in ([USER], [SYSTEM, USER])
    )
    knows_developer = "developer" in template
    num_nones = attempt([USER]).count("None")
    for short_ids, as_text, empty in product((False, True), repeat=3):
        traits = TemplateTraits(takes_tools, True, as_text, empty, short_ids, knows_developer)
        text = attempt(traits.adapt([USER, CALLING]))
        # 'probe_key' in Python's quotes is an object written where text was expected;
        # \"probe_key\" is text where an object was expected.
        is_right = (
            all(word in text for word in ("probe_function", "probe_key", "probe value"))
            and "'probe_key'" not in text
        )
        if is_right and '\\"probe_key' not in text and text.count("None") <= num_nones:
            two_calls = traits.adapt(
                [
                    USER,
                    {**CALLING, "tool_calls": [PROBE_CALL, {**PROBE_CALL, "id": PROBE_ID[::-1]}]},
                ]
            )
            takes_several_calls = attempt(two_calls).count("probe value") == 2
            return replace(traits, takes_several_calls=takes_several_calls)
    return TemplateTraits(takes_tools, False, knows_developer=knows_developer)
