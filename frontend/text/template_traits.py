"""Detects what a chat template supports of tools and tool calls by rendering a small conversation.

Must not know: jinja2, how a template is rendered (chat_template.py passes that in), markers of any
model.

Templates differ in what they read: arguments as an object or as text, no content or empty content
in messages with calls, any id or only ids of one form. A wrong assumption fails or writes Python's
None into the prompt. Rendering is more reliable than searching the template's text.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import msgspec
from msgspec.structs import replace

from . import chat_messages as forms
from .chat_images import with_text_parts

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
BARE_TOOL = {"type": "function", "function": {"name": "bare_function"}}
PROBE_ID = "call_0123456789abcdef01234567"
PROBE_CALL = {
    "id": PROBE_ID,
    "type": "function",
    "function": {"name": "probe_function", "arguments": {"probe_key": "probe value"}},
}
USER = {"role": "user", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Probe as a developer."}
ANSWER = {"role": "assistant", "content": "Hi!"}
CALLING = {"role": "assistant", "tool_calls": [PROBE_CALL]}
TWO_CALLS = {**CALLING, "tool_calls": [PROBE_CALL, {**PROBE_CALL, "id": PROBE_ID[::-1]}]}
REASONING = "probe thought"
REASONED = {**CALLING, "reasoning_content": REASONING, "reasoning": REASONING}
IMAGE = {"type": "image"}
RESULT = {
    "role": "tool",
    "tool_call_id": PROBE_ID,
    "content": '{"probe_result": 1}',
}


class TemplateTraits(msgspec.Struct, frozen=True):
    takes_tools: bool  # it writes the tools into the prompt
    writes_calls: bool  # it writes the calls of earlier turns
    arguments_as_text: bool = False
    empty_content: bool = False
    short_ids: bool = False
    function_ids: bool = False  # it writes the id of a call and not its function
    result_names: bool = False  # it fails on results without the function's name
    knows_developer: bool = True
    takes_several_calls: bool = True  # in one turn
    one_call: bool = False  # per message; further ones need messages of their own
    takes_system: bool = True  # it does not refuse a system message
    takes_neighbours: bool = True  # it does not refuse two messages of the user in a row
    # place and role of the further instructions that it refuses or drops
    lost_instructions: frozenset[tuple[str, str]] = frozenset()
    needs_descriptions: bool = False  # of tools
    reads_thinking: bool = False  # reasoning under this name only
    thinking_or_content: bool = False  # not both in a message with calls
    results_as_json: bool = False
    text_parts: bool = False  # it reads the parts of a content and not its text
    image_roles: frozenset[str] = frozenset()  # of messages whose images it writes

    def adapt_tools(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        return forms.with_descriptions(tools) if tools and self.needs_descriptions else tools

    def adapt(self, messages: Messages) -> Messages:
        """Converts normalized messages to the form that this template reads."""
        if not self.knows_developer:
            messages = forms.with_system_for_developer(messages)
        if not self.takes_system:
            messages = forms.with_instruction_for_user(messages)
        elif not self.lost_instructions.isdisjoint(forms.further_instructions(messages)):
            messages = forms.with_one_instruction(messages)
        if not self.takes_neighbours:
            messages = forms.with_joined_users(messages)
        for name, convert in CONVERSIONS.items():
            if getattr(self, name):
                messages = convert(messages)
        return messages


# trait -> what it needs, in this order
CONVERSIONS: dict[str, Callable[[Messages], Messages]] = {
    "arguments_as_text": forms.with_arguments_as_text,
    "empty_content": forms.with_empty_content,
    "result_names": forms.with_result_names,
    "short_ids": forms.with_short_ids,
    "function_ids": forms.with_function_ids,
    "one_call": forms.with_one_call,
    "reads_thinking": forms.with_thinking,
    "thinking_or_content": forms.with_content_as_thinking,
    "results_as_json": forms.with_results_as_json,
    "text_parts": with_text_parts,
}


def find_traits(render: Render) -> TemplateTraits:
    """`render(messages, tools)` returns the prompt, and may raise any exception."""

    def attempt(messages: Messages, tools: list[dict] | None = None) -> str:
        try:
            return render(messages, tools)
        except Exception:
            return ""

    text_parts = _needs_text_parts(attempt)
    if text_parts:
        attempt = _in_parts(attempt)
    takes_tools = any(
        "probe_function" in attempt(messages, [PROBE_TOOL]) for messages in ([USER], [SYSTEM, USER])
    )
    traits = TemplateTraits(takes_tools, writes_calls=False, text_parts=text_parts)
    traits = replace(
        _traits_of_instructions(traits, attempt),
        needs_descriptions=takes_tools
        and not attempt([USER], [BARE_TOOL])
        and "bare_function" in attempt([USER], forms.with_descriptions([BARE_TOOL])),
    )
    traits = _traits_of_calls(traits, attempt)
    return replace(traits, image_roles=_image_roles(traits, attempt))


def _needs_text_parts(attempt: Render) -> bool:
    text = USER["content"]
    return text not in attempt([USER]) and text in attempt(with_text_parts([USER]))


def _in_parts(attempt: Render) -> Render:
    def attempt_in_parts(messages: Messages, tools: list[dict] | None = None) -> str:
        return attempt(with_text_parts(messages), tools)

    return attempt_in_parts


def _image_roles(traits: TemplateTraits, attempt: Render) -> frozenset[str]:
    """Returns the roles of messages whose images and texts it writes, each at its place."""

    def takes_parts(before: Messages, message: dict[str, Any]) -> bool:
        text = {"type": "text", "text": "probe caption"}
        without, with_image = (
            attempt(traits.adapt([*before, {**message, "content": content}]))
            for content in ([text], [IMAGE, text])
        )
        # a template that knows no parts may write them as Python's or JSON's list
        is_list = any(f"{q}{kind}{q}" in with_image for q in "'\"" for kind in ("text", "image"))
        head, caption, _ = with_image.partition("probe caption")
        return bool(caption) and not is_list and not without.startswith(head)

    roles = {"user"} if takes_parts([], USER) else set()
    if traits.writes_calls and takes_parts([USER, CALLING], RESULT):
        roles.add("tool")
    return frozenset(roles)


def _traits_of_instructions(traits: TemplateTraits, attempt: Render) -> TemplateTraits:
    def are_written(*instructed: dict[str, Any]) -> bool:
        text = attempt([*instructed])
        return all(m["content"] in text for m in instructed if m["role"] in ("system", "developer"))

    # a template that writes any role into its header does not know this one
    developer = attempt([DEVELOPER, USER])
    unknown = attempt([{**DEVELOPER, "role": "probe_role"}, USER])
    knows_developer = DEVELOPER["content"] in developer and developer.replace(
        "developer", "probe_role"
    ) != unknown.replace("developer", "probe_role")
    takes_system = bool(attempt([SYSTEM, USER])) or not attempt([USER])
    second = {**SYSTEM, "content": "Probe twice."}
    lost = set()
    for further in (second, DEVELOPER) if knows_developer else (second,):
        if not are_written(SYSTEM, further, USER):
            lost.add(("leading", further["role"]))
        if not are_written(SYSTEM, USER, ANSWER, further, USER):
            lost.add(("late", further["role"]))
    return replace(
        traits,
        knows_developer=knows_developer,
        takes_system=takes_system,
        takes_neighbours=bool(attempt([USER, USER])) or not attempt([USER]),
        lost_instructions=frozenset(lost if are_written(SYSTEM, USER) else ()),
    )


def _traits_of_calls(traits: TemplateTraits, attempt: Render) -> TemplateTraits:
    num_nones = attempt([USER]).count("None")
    renders = []  # in which form calls are not refused, if they are written in none
    # some templates take no results, or look at content only where a message follows
    for turn in ([CALLING, RESULT], [CALLING]):
        for names, short_ids, as_text, empty in product((False, True), repeat=4):
            found = replace(
                traits,
                writes_calls=True,
                arguments_as_text=as_text,
                empty_content=empty,
                result_names=names,
                short_ids=short_ids,
            )
            text = attempt(found.adapt([USER, *turn]))
            if not text or text.count("None") > num_nones:
                continue
            renders.append(found)
            if PROBE_ID in text and "probe_function" not in text:
                found = replace(found, function_ids=True)
                text = attempt(found.adapt([USER, *turn]))
            # 'probe_key' in Python's quotes is an object written where text was expected;
            # \"probe_key\" is text where an object was expected.
            is_right = (
                all(word in text for word in ("probe_function", "probe_key", "probe value"))
                and "'probe_key'" not in text
            )
            if is_right and '\\"probe_key' not in text:
                return _with_traits_of_turns(found, attempt)
    return replace(renders[0], writes_calls=False) if renders else traits


def _with_traits_of_turns(traits: TemplateTraits, attempt: Render) -> TemplateTraits:
    """Adds what the template supports of messages with calls beside the calls' own form."""

    def written(traits: TemplateTraits, *messages: dict[str, Any]) -> str:
        return attempt(traits.adapt([USER, *messages]))

    def writes_both(traits: TemplateTraits) -> bool:
        return written(traits, TWO_CALLS).count("probe value") == 2

    if not writes_both(traits):
        split = replace(traits, one_call=True)
        traits = replace(traits, takes_several_calls=False, one_call=writes_both(split))
    thinking = replace(traits, reads_thinking=True)
    if REASONING not in written(traits, REASONED) and REASONING in written(thinking, REASONED):
        both = written(thinking, {**REASONED, "content": "probe content"})
        result = written(thinking, CALLING, RESULT)
        traits = replace(
            thinking,
            thinking_or_content=REASONING not in both or "probe content" not in both,
            # other templates with this property are given text, as in transformers
            results_as_json='\\"probe_result' in result,
        )
    return traits
