"""Calls: numbers and parts of the parsed calls."""

from quire.frontend.answer_format.answer import ToolCallArguments, ToolCallStart
from quire.frontend.answer_format.text_stream import TextStream
from quire.frontend.answer_format.tool_calls import Calls


def test_calls_are_numbered_and_know_their_text() -> None:
    stream = TextStream()
    calls = Calls(stream, {"f": {}})
    stream.append("call f and g")
    stream.go_to(6)
    calls.start("f")
    assert stream.buffer == " and g"
    calls.emit_arguments("{}")
    calls.start("g")
    assert stream.take_parts() == [
        ToolCallStart(0, "f"),
        ToolCallArguments(0, "{}"),
        ToolCallStart(1, "g"),
    ]
    assert calls.arguments_part("{") == ToolCallArguments(1, "{")
