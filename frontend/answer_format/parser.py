"""AnswerParser: parses a completion's text, piece by piece, into content, reasoning and tool calls.

Must not know: which model it is, tokens, requests.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from .answer import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from .harmony import HarmonyCalls, HarmonyReasoning, read_messages
from .reasoning import ReasoningMarks
from .text_stream import Malformed, TextReader, TextStream
from .tool_calls import Calls, ToolFormat

# This many characters of broken calls in an answer are searched for other calls. Each may be
# searched again for every mark before it, so without a limit the work grows with the square of the
# length.
MAX_REREAD = 1 << 16


class AnswerParser:
    """The parts do not depend on how the text is cut.

    Everything except the marks and the whitespace around them appears in a part. Text that looks
    like a call and is not one becomes content, as does a call that breaks off: the arguments of
    every call are a JSON object.

    If `tool_format` is None, there are no tool calls. If `reasoning_marks` is None, there is no
    reasoning. Reasoning may begin in the prompt, with its mark only or with text
    (`is_within_reasoning`), and so may the content with its mark (`begins_in_content`). Calls
    beyond `max_calls` are dropped. `harmony_header` is for answers in this format: it is what the
    prompt holds of the first message's header (harmony.header_at_end_of). With `calls_are_valid`, a
    grammar constrains the calls, so their arguments are passed on as they arrive. They are an
    object unless the answer breaks off.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_marks: ReasoningMarks | None,
        schemas: dict[str, dict[str, Any]],
        *,
        begins_in_reasoning: bool = False,
        is_within_reasoning: bool = False,
        begins_in_content: bool = False,
        max_calls: int | None = None,
        harmony_header: str | None = None,
        calls_are_valid: bool = False,
    ):
        self._stream = TextStream()
        self._calls = Calls(self._stream, schemas, are_valid=calls_are_valid)
        self._tool_format = tool_format
        self._reasoning_marks = reasoning_marks
        self._begins_in_reasoning = begins_in_reasoning
        self._is_within_reasoning = is_within_reasoning
        self._begins_in_content = begins_in_content
        self._max_calls = max_calls
        self._harmony_header = harmony_header
        # From here on all text is content: feed(text) would be [Content(text)].
        self.is_plain = False
        self._steps = self._read_answer()
        next(self._steps, None)

    def feed(self, text: str) -> list[Part]:
        """Returns the parts that this text completes."""
        if self.is_plain:
            return [Content(text)] if text else []
        self._stream.append(text)
        return self._advance()

    def finish(self) -> list[Part]:
        """Returns the remaining parts, after the last text."""
        self._stream.end()
        return self._advance()

    @property
    def is_in_call(self) -> bool:
        """Tells whether a call that is passed on has not ended; after `finish` it is cut off."""
        return self._calls.is_cut

    def _advance(self) -> list[Part]:
        next(self._steps, None)
        parts = self._stream.take_parts()
        if self._max_calls is None:
            return parts
        return [
            part
            for part in parts
            if not isinstance(part, (ToolCallStart, ToolCallArguments))
            or part.index < self._max_calls
        ]

    def _read_answer(self) -> TextReader:
        if self._harmony_header is not None:
            self._stream.append(self._harmony_header)
            calls = self._tool_format if isinstance(self._tool_format, HarmonyCalls) else None
            reads_reasoning = isinstance(self._reasoning_marks, HarmonyReasoning)
            yield from read_messages(self._stream, self._calls, calls, reads_reasoning)
            return
        ends: tuple[str, ...] = ()
        if (marks := self._reasoning_marks) is not None:
            has_end = self._begins_in_content
            if not has_end:
                yield from self._read_reasoning(marks)
                if marks.content_start:
                    has_end = yield from self._read_content_start(marks.content_start)
            ends = tuple(filter(None, (marks.content_end if has_end else "", marks.answer_end)))
        if self._tool_format is not None:
            yield from self._read_content_and_calls(self._tool_format, ends)
            return
        while ends:
            self._stream.open_sink(Content)
            mark = yield from self._stream.read_until(ends)
            if mark is None:
                return
            ends = yield from self._read_end(mark, ends)
        self._read_plain()

    def _read_end(self, mark: str, ends: tuple[str, ...]) -> Generator[None, None, tuple[str, ...]]:
        """Drops `mark`, one of the marks after the content. Returns those that may follow."""
        self._stream.drop()
        yield from self._drop_last_space()
        return tuple(end for end in ends if end != mark)

    def _read_plain(self) -> None:
        """Reads the rest as content."""
        self.is_plain = True
        self._stream.go_to(len(self._stream.buffer))
        self._stream.open_sink(Content)
        self._stream.close_sink()

    def _read_reasoning(self, marks: ReasoningMarks) -> TextReader:
        """Reads it only at the beginning of the answer: an answer may mention <think> later."""
        stream = self._stream
        if self._is_within_reasoning:
            pass  # all of the text continues it
        elif not self._begins_in_reasoning:
            yield from stream.skip_space()
            if marks.may_omit_start and (yield from stream.accept(marks.end)):
                yield from stream.skip_space()
                stream.drop()
                return
            if not (yield from stream.accept(marks.start)):
                stream.go_to(0)
                return
        elif marks.start:
            yield from stream.skip_space()
            yield from stream.accept(marks.start)  # some models open it again
        if not self._is_within_reasoning:
            yield from stream.skip_space()
        stream.drop()
        yield from self._read_reasoning_text(marks)
        yield from stream.skip_space()
        stream.drop()

    def _read_reasoning_text(self, marks: ReasoningMarks) -> TextReader:
        """Reads it up to and including its end mark. Qwen3.5 and Kimi K2 Thinking sometimes call
        without the mark, so calls with which the answer ends are calls. Others are reasoning, as
        models draft their calls.
        """
        stream, calls, num_reread = self._stream, self._calls, 0
        while True:
            stream.open_sink(Reasoning)
            starts: tuple[str, ...] = ()
            if self._tool_format and not calls.are_valid and num_reread < MAX_REREAD:
                starts = self._tool_format.starts
            mark = yield from stream.read_until((marks.end, *starts))
            if mark is None or mark == marks.end:
                return
            calls.begin_draft()
            try:
                yield from self._read_last_calls(mark, marks.end)
                calls.end()
            except Malformed:
                num_reread += calls.give_up()

    def _read_last_calls(self, mark: str | None, end: str) -> TextReader:
        """Reads calls and the answer's end, before which the mark `end` may stand. Raises
        Malformed.
        """
        stream, tool_format = self._stream, self._tool_format
        assert tool_format is not None
        while mark:
            yield from tool_format.read(stream, self._calls, mark)
            yield from stream.skip_space()
            mark = ""
            for start in tool_format.starts:
                mark = mark or (start if (yield from stream.accept(start)) else "")
        yield from stream.accept(end)
        yield from stream.skip_space()
        if (yield from stream.peek()):
            raise Malformed
        stream.drop()

    def _read_content_start(self, mark: str) -> Generator[None, None, bool]:
        yield from self._stream.skip_space()
        if not (yield from self._stream.accept(mark)):
            self._stream.go_to(0)
            return False
        yield from self._stream.skip_space()
        self._stream.drop()
        return True

    def _read_content_and_calls(self, tool_format: ToolFormat, ends: tuple[str, ...]) -> TextReader:
        """`ends` are marks after the content, whose first occurrences are dropped."""
        stream, may_be_bare, has_called, num_reread = self._stream, True, False, 0
        while num_reread < MAX_REREAD:
            mark: str | None = ""
            try:
                if not (may_be_bare and (yield from self._begins_bare(tool_format, has_called))):
                    stream.open_sink(Content)
                    mark = yield from stream.read_until(tool_format.starts + ends)
                    if mark is None:
                        return
                    if mark in ends:
                        ends = yield from self._read_end(mark, ends)
                        continue
                self._calls.begin()
                yield from tool_format.read(stream, self._calls, mark)
                self._calls.end()
                yield from self._drop_last_space()
                may_be_bare = has_called = True
            except Malformed:
                num_reread += self._calls.give_up()
                may_be_bare = False
        self._read_plain()

    def _drop_last_space(self) -> TextReader:
        """Drops whitespace between a call and the end, which belongs to the format. Before more
        content it is content.
        """
        yield from self._stream.skip_space()
        if (yield from self._stream.peek()):
            self._stream.go_to(0)
        self._stream.drop()

    def _begins_bare(
        self, tool_format: ToolFormat, has_called: bool
    ) -> Generator[None, None, bool]:
        if not tool_format.bare_beginnings:
            return False
        stream = self._stream
        yield from stream.skip_space()
        if (
            has_called
            and tool_format.bare_separator
            and (yield from stream.accept(tool_format.bare_separator))
        ):
            yield from stream.skip_space()
        character = yield from stream.peek()
        if character and character in tool_format.bare_beginnings:
            return True
        stream.go_to(0)
        return False
