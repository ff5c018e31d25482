"""The parts of an answer joined together."""

from quire.frontend.answer_format import (
    Content,
    ParsedAnswer,
    ParsedToolCall,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    collect,
)


def test_parts_are_joined() -> None:
    parts = [
        Reasoning("a"),
        Reasoning("b"),
        Content("c"),
        ToolCallStart(0, "f"),
        ToolCallArguments(0, '{"x"'),
        ToolCallArguments(0, ": 1}"),
        ToolCallStart(1, "g"),
        ToolCallArguments(1, "{}"),
        Content("d"),
    ]
    assert collect(parts) == ParsedAnswer(
        "cd", "ab", [ParsedToolCall("f", '{"x": 1}'), ParsedToolCall("g", "{}")]
    )


def test_answers_share_no_state() -> None:
    collect([ToolCallStart(0, "f")])
    assert collect([]) == ParsedAnswer("", "", [])
