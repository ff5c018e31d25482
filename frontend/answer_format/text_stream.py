"""TextStream: text that arrives in pieces, read by generators as if all of it were there, and
handed on as parts.

Must not know: any model's format.

A reader is a generator. Where it needs text that has not come yet it yields, and goes on when some
has: so each format is written down in the order in which it is read. What a reader finds must not
depend on how the text was cut, so it decides on characters alone, never on the end of what happens
to be there.

    buffer:   │ consumed, not handed on │ not read yet │
              0                      position        len
Consumed text is handed on through the open sink (content, say) whenever the reader pauses; without a sink it stays, so that it can become
content if it turns out to be no call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache

from .answer import Part

Reader = Generator[None, None, None]
MAX_HELD_SPACE = 64  # white space before a mark belongs to it, as far as this


class Malformed(Exception):
    """The text is not what the format demands. What was not handed on of it becomes content."""


class TextStream:
    def __init__(self) -> None:
        self.buffer = ""
        self.position = 0
        self.has_ended = False
        self.parts: list[Part] = []
        self.sink: Callable[[str], Part] | None = None
        # where content goes on if the reader behind a mark fails: behind the mark, which cannot
        # match again
        self.retry_position = 0

    # ------------------------------------------------------------ the reader's side

    def more(self) -> Generator[None, None, bool]:
        """Waits for text. False: there is none to come."""
        if self.has_ended:
            return False
        self.flush()
        yield
        return not self.has_ended

    def peek(self) -> Generator[None, None, str]:
        """The next character, or "" at the end."""
        while self.position >= len(self.buffer):
            if not (yield from self.more()):
                return ""
        return self.buffer[self.position]

    def accept(self, literal: str) -> Generator[None, None, bool]:
        """Consumes `literal` if it comes next."""
        while True:
            there = self.buffer[self.position : self.position + len(literal)]
            if there == literal:
                self.position += len(literal)
                return True
            if not literal.startswith(there) or not (yield from self.more()):
                return False

    def expect(self, literal: str) -> Reader:
        if not (yield from self.accept(literal)):
            raise Malformed

    def skip_space(self) -> Reader:
        while (yield from self.peek()).isspace():
            self.position += 1

    def read_while(self, allowed: re.Pattern[str], most: int) -> Generator[None, None, str]:
        """Consumes characters that match `allowed`; the text.

        Raises Malformed beyond `most` of them.
        """
        text = ""
        while (character := (yield from self.peek())) and allowed.match(character):
            text += character
            self.position += 1
            if len(text) > most:
                raise Malformed
        return text

    def read_until(
        self, marks: tuple[str, ...], *, keeps_space: bool = False
    ) -> Generator[None, None, str | None]:
        """Consumes all before the first of `marks`, and then the mark, which it returns.

        White space before a mark belongs to it, unless
        `keeps_space`.

        With a sink the text is handed on; the mark is not. None: no mark came; the rest is
        consumed.
        """
        pattern = _mark_pattern(marks, 0 if keeps_space else MAX_HELD_SPACE)
        while True:
            found = pattern.search(self.buffer, self.position)
            assert found is not None  # the pattern matches the empty text at the end
            self.position = found.start()
            if mark := found[1]:
                self.close_sink()
                self.position += len(found[0])
                self.retry_position = self.position
                return mark
            if not (yield from self.more()):
                self.position = len(self.buffer)
                self.close_sink()
                return None

    # ------------------------------------------------------------ handing on

    def emit(self, part: Part) -> None:
        """Hands on a part that stands for all that was consumed."""
        self.drop()
        self.parts.append(part)

    def drop(self) -> None:
        """Forgets what was consumed: it was the format's, or a part says it."""
        self.buffer, self.position, self.retry_position = self.buffer[self.position :], 0, 0

    def flush(self) -> None:
        """Hands on what was consumed, if there is a sink."""
        if self.sink is not None and self.position:
            self.emit(self.sink(self.buffer[: self.position]))

    def close_sink(self) -> None:
        self.flush()
        self.sink = None

    def give_up(self) -> None:
        """After Malformed: what was not handed on is to be read again, as content."""
        self.close_sink()
        self.position = self.retry_position

    # ------------------------------------------------------------ the writer's side

    def append(self, text: str) -> None:
        self.buffer += text

    def take_parts(self) -> list[Part]:
        parts, self.parts = self.parts, []
        return parts


@lru_cache(maxsize=64)
def _mark_pattern(marks: tuple[str, ...], max_space: int) -> re.Pattern[str]:
    """Finds the first mark (group 1), or else what may be the beginning of one at the end, which
    may be nothing; with the space before it.
    """
    wholes = "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)"
    beginnings = "|".join(
        re.escape(mark[:length]) for mark in marks for length in range(1, len(mark))
    )
    return re.compile(rf"\s{{0,{max_space if marks else 0}}}(?:({wholes})|(?:{beginnings})?\Z)")
