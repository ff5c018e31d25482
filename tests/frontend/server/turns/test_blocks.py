"""Blocks: their start, growth and end as parts arrive. How the parts are split does not matter."""

from quire.frontend.answer_format import Content, Reasoning, ToolCallArguments, ToolCallStart
from quire.frontend.server.turns.blocks import AnswerBlocks

PARTS = [
    Reasoning("th"),
    Reasoning("ink"),
    Content("a"),
    Content(""),
    ToolCallStart(0, "f"),
    ToolCallArguments(0, '{"x":'),
    ToolCallArguments(0, "1}"),
]
PARTS += [ToolCallStart(1, "g"), Content("b")]


def test_each_block_starts_grows_and_ends() -> None:
    blocks = AnswerBlocks()
    events = [
        (what, block.kind, block.index, text)
        for what, block, text in [*blocks.feed(PARTS), *blocks.close()]
    ]
    assert events == [
        ("start", "reasoning", 0, ""),
        ("delta", "reasoning", 0, "th"),
        ("delta", "reasoning", 0, "ink"),
        ("stop", "reasoning", 0, ""),
        ("start", "text", 1, ""),
        ("delta", "text", 1, "a"),
        ("stop", "text", 1, ""),
        ("start", "call", 2, ""),
        ("delta", "call", 2, '{"x":'),
        ("delta", "call", 2, "1}"),
        ("stop", "call", 2, ""),
        ("start", "call", 3, ""),
        ("stop", "call", 3, ""),
        ("start", "text", 4, ""),
        ("delta", "text", 4, "b"),
        ("stop", "text", 4, ""),
    ]
    assert blocks.close() == []
    assert [(block.kind, block.name, block.text) for block in blocks.blocks][2:4] == [
        ("call", "f", '{"x":1}'),
        ("call", "g", ""),
    ]


def test_one_by_one_or_at_once() -> None:
    one_by_one, at_once = AnswerBlocks(), AnswerBlocks()
    events = [event for part in PARTS for event in one_by_one.feed([part])]
    assert [(what, block.index, text) for what, block, text in events] == [
        (what, block.index, text) for what, block, text in at_once.feed(PARTS)
    ]


def test_arguments_of_a_call() -> None:
    blocks = AnswerBlocks()
    blocks.feed([ToolCallStart(0, "f"), ToolCallArguments(0, '{"x": 1}')])
    assert blocks.blocks[0].arguments() == {"x": 1}
