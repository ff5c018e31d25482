"""TextStream: text that arrives in pieces, read by generators as if it were complete, and
passed on as parts.

Must not know: any model's format.

A reader is a generator. It yields when it needs text that has not arrived, and continues when some
has, so each format is written in the order in which it is read. The result must not depend on how
the text is cut, so a reader decides on characters only, never on the current end of the buffer.

    buffer:   │ consumed, not passed on │ not read yet │
              0                      position        len

Consumed text is passed on through the open sink (content, say) whenever the reader pauses. Without
a sink it is kept, so that it can become content if it turns out not to be a call. Between `hold`
and `release` the parts wait too, and become content again if the reader gives up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache

from .answer import Part

TextReader = Generator[None, None, None]
MAX_HELD_SPACE = 64  # whitespace before a mark belongs to it, up to this length


class Malformed(Exception):
    """The text does not follow the format. What was not passed on becomes content."""


class TextStream:
    def __init__(self) -> None:
        self.buffer = ""
        self.position = 0
        self.has_ended = False
        self.parts: list[Part] = []
        self.sink: Callable[[str], Part] | None = None
        # Content continues here if the reader of a mark fails: after the mark, which cannot match
        # again.
        self.retry_position = 0
        self._held: list[str] | None = None  # the text behind the parts that wait
        self._num_released = 0  # parts that do not wait, while others do
        self._retry_held = 0  # retry_position in the held text
        # Each entry is (position, length, text): consumed text that `replace` changed, while there
        # is no sink.
        self._replacements: list[tuple[int, int, str]] = []

    # ------------------------------------------------------------ for readers

    def more(self) -> Generator[None, None, bool]:
        """Waits for text. Returns False at the end."""
        if self.has_ended:
            return False
        self.flush()
        yield
        return not self.has_ended

    def peek(self) -> Generator[None, None, str]:
        """Returns the next character, or "" at the end."""
        while self.position >= len(self.buffer):
            if not (yield from self.more()):
                return ""
        return self.buffer[self.position]

    def peek_past(self, count: int, skipped: str) -> Generator[None, None, str]:
        """Returns the first character that is not in `skipped`, from `count` characters ahead. At
        the end it returns "".
        """
        while True:
            index = self.position + count
            if index >= len(self.buffer):
                if not (yield from self.more()):
                    return ""
            elif self.buffer[index] in skipped:
                count += 1
            else:
                return self.buffer[index]

    def accept(self, literal: str) -> Generator[None, None, bool]:
        """Consumes `literal` if it comes next."""
        while True:
            there = self.buffer[self.position : self.position + len(literal)]
            if there == literal:
                self.position += len(literal)
                return True
            if not literal.startswith(there) or not (yield from self.more()):
                return False

    def expect(self, literal: str) -> TextReader:
        if not (yield from self.accept(literal)):
            raise Malformed

    def skip_space(self) -> TextReader:
        while (yield from self.peek()).isspace():
            self.position += 1

    def read_while(self, allowed: re.Pattern[str], most: int) -> Generator[None, None, str]:
        """Consumes characters that match `allowed`; returns the text.

        Raises Malformed beyond `most` characters.
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
        """Consumes the text before the first of `marks`, and that mark, which it returns.

        Whitespace before a mark belongs to it, unless `keeps_space`. With a sink the text is passed
        on; the mark is not. Returns None at the end if no mark came; the rest is consumed.
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

    def skip(self, count: int) -> None:
        """Consumes characters that have arrived."""
        self.position += count

    def put_back(self, count: int) -> None:
        """Lets the last `count` consumed characters be read again."""
        self.position -= count

    def go_to(self, position: int) -> None:
        """Consumes what is before `position` in the buffer; the rest is read (again)."""
        self.position = position

    # ------------------------------------------------------------ passing on

    def open_sink(self, sink: Callable[[str], Part] | None) -> None:
        """From here on, passes consumed text on as the parts that `sink` makes of it."""
        self.sink = sink

    def emit(self, part: Part) -> None:
        """Passes on a part in place of the consumed text."""
        self.drop()
        self.parts.append(part)

    def drop(self) -> None:
        """Discards the consumed text: it belongs to the format, or a part contains it."""
        if self._held is not None:
            self._held.append(self.buffer[: self.position])
        self.buffer, self.position, self.retry_position = self.buffer[self.position :], 0, 0
        self._replacements.clear()

    def replace(self, length: int, text: str) -> None:
        """Consumes `length` characters and passes on `text` in their place."""
        if self.sink is None:
            self._replacements.append((self.position, length, text))
            self.position += length
            return
        self.flush()
        self.position += length
        if text:
            self.emit(self.sink(text))
        else:
            self.drop()

    def consumed_since(self, start: int) -> str:
        """Returns the consumed text from the position `start`, with what `replace` put into it."""
        pieces = []
        for position, length, text in self._replacements:
            if position >= start:
                pieces += [self.buffer[start:position], text]
                start = position + length
        return "".join([*pieces, self.buffer[start : self.position]])

    def hold(self) -> None:
        """Lets the parts that follow wait for `release`, so that `give_up` can take them back."""
        self._held, self._num_released = [], len(self.parts)
        self._retry_held = self.retry_position

    def release(self) -> None:
        self._held = None

    def flush(self) -> None:
        """Passes on the consumed text, if there is a sink."""
        if self.sink is not None and self.position:
            self.emit(self.sink(self.buffer[: self.position]))

    def close_sink(self) -> None:
        self.flush()
        self.sink = None

    def give_up(self) -> int:
        """After Malformed, lets what was not passed on, or was held, be read again as content.

        Returns the number of characters behind the mark that had been read.
        """
        num_read = sum(map(len, self._held or ())) + self.position
        self.close_sink()
        if self._held is not None:
            del self.parts[self._num_released :]
            self.buffer = "".join([*self._held, self.buffer])
            self._held, self.retry_position = None, self._retry_held
        self.position = self.retry_position
        self._replacements.clear()
        return num_read - self.retry_position

    # ------------------------------------------------------------ for the writer

    def append(self, text: str) -> None:
        self.buffer += text

    def end(self) -> None:
        """Notes that all text has arrived."""
        self.has_ended = True

    def take_parts(self) -> list[Part]:
        count = len(self.parts) if self._held is None else self._num_released
        parts, self.parts = self.parts[:count], self.parts[count:]
        self._num_released = 0
        return parts


@lru_cache(maxsize=64)
def _mark_pattern(marks: tuple[str, ...], max_space: int) -> re.Pattern[str]:
    """Finds the first mark (group 1) with the whitespace before it.

    Otherwise it finds what may be the beginning of a mark at the end, which may be empty.
    """
    wholes = "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)"
    beginnings = "|".join(
        re.escape(mark[:length]) for mark in marks for length in range(1, len(mark))
    )
    return re.compile(rf"\s{{0,{max_space if marks else 0}}}(?:({wholes})|(?:{beginnings})?\Z)")
