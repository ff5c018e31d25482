"""Conversion of Anthropic's messages for templates: merged turns, thoughts, and long messages."""

from typing import Any

import msgspec
from quire.frontend.server.apis.messages_turn import (
    AnthropicMessage,
    SystemBlock,
    plain_messages,
)

REDACTED = {"type": "redacted_thinking", "data": "x"}


def plain(
    *messages: dict[str, Any], system: str | list[SystemBlock] | None = None
) -> list[dict[str, Any]]:
    return plain_messages(system, msgspec.convert(messages, list[AnthropicMessage]))


def test_turns_of_one_role_become_one() -> None:
    found = plain(
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    )
    assert found == [{"role": "user", "content": "a\nb\nc"}]


def test_thoughts_are_kept_next_to_the_text() -> None:
    thoughts = [
        {"type": "thinking", "thinking": "h", "signature": "s"},
        REDACTED,
        {"type": "thinking", "thinking": "m"},
    ]
    assert plain({"role": "assistant", "content": [*thoughts, {"type": "text", "text": "a"}]}) == [
        {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    ]


def test_an_empty_message_is_a_message() -> None:
    for content in ("", [], [REDACTED]):
        assert plain({"role": "assistant", "content": content}) == [
            {"role": "assistant", "content": ""}
        ]


def test_a_text_in_very_many_pieces() -> None:
    """The text is joined at once, since appending piece by piece would copy the whole each time."""
    pieces = [{"type": "text", "text": "x"}] * 300_000
    (message,) = plain({"role": "user", "content": pieces})
    assert len(message["content"]) == 2 * len(pieces) - 1
    system = [SystemBlock(text="a"), SystemBlock(text="b")]
    assert plain({"role": "user", "content": "c"}, system=system)[0] == {
        "role": "system",
        "content": "a\nb",
    }
