"""What a conversation looks like in a terminal: the line editor with its history, and answers as
Markdown.

Must not know: engines, what a command does.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .terminal import Dim

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

PROMPT = "> "
REFRESH_S = 0.06  # between two drawings of an unfinished paragraph
# a model could move the cursor or change the terminal's title
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


def history_file() -> Path:
    """In the user's state directory, by the XDG base directory specification."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "quire" / "chat_history"


def open_history(path: Path, notice: Any) -> History:
    """The turns of earlier sessions, in a file that only its owner reads (mode 0600).

    Where the file cannot be written, `notice` is called with a sentence and the history lasts for
    the session.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class QuietHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk must not end the conversation
                super().store_string(string)

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
        if not path.is_file():
            raise OSError(0, "is not a regular file")
    except OSError as error:
        notice(f"history is not kept: {path} {error.strerror}")
        return InMemoryHistory()
    return QuietHistory(str(path))


def make_editor(history: History, commands: list[str], **options: Any) -> PromptSession[str]:
    """Reads a turn: Enter sends it, Alt-Enter or a backslash at its end begins a new line, and
    pasted text keeps its lines. `options`: of PromptSession.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output.vt100 import Vt100_Output
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    if "output" not in options and (terminal := _terminal()) is not None:
        output = Vt100_Output.from_pty(terminal, term=os.environ.get("TERM"))
        output.enable_cpr = False  # not every terminal answers where its cursor is
        options["output"] = output
    session: PromptSession[str] = PromptSession(
        PROMPT,
        history=history,
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=Condition(lambda: False),
        complete_style=CompleteStyle.READLINE_LIKE,
        **options,
    )
    return session


def _terminal() -> TextIO | None:
    return next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)


class PlainDisplay:
    """Prints an answer as it comes."""

    def __init__(self, out: TextIO, err: TextIO):
        self.out, self.err, self.dim = out, err, Dim(out)

    def write(self, text: str) -> None:
        print(text, end="", file=self.out, flush=True)

    def end(self) -> None:
        print(file=self.out, flush=True)

    def notice(self, text: str) -> None:
        print(self.dim(text), file=self.out if self.out.isatty() else self.err, flush=True)

    def error(self, text: str) -> None:
        print(f"quire: {text}", file=self.err, flush=True)


class MarkdownDisplay(PlainDisplay):
    """Renders Markdown: complete blocks are printed once, the unfinished one is drawn again as it
    grows.
    """

    def __init__(self, out: TextIO, err: TextIO):
        from rich.console import Console

        super().__init__(out, err)
        self.console = Console(file=out, highlight=False)
        self._pending = ""  # of the answer, not yet printed for good
        self._live: Any = None
        self._drawn_at = 0.0

    def write(self, text: str) -> None:
        self._pending += _CONTROL.sub("", text)
        block, rest = split_blocks(self._pending)
        if block:
            self._print(block)
            self._pending = rest
        if time.monotonic() - self._drawn_at >= REFRESH_S:
            self._draw()

    def end(self) -> None:
        self._print(self._pending)
        self._pending = ""

    def _print(self, block: str) -> None:
        from rich.markdown import Markdown

        self._stop()
        if block.strip():
            self.console.print(Markdown(block))
            self.console.print()

    def _draw(self) -> None:
        from rich.live import Live
        from rich.markdown import Markdown

        if not self._pending.strip():
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        # what does not fit on the screen could not be erased again
        shown = last_lines(self._pending, max(1, self.console.height // 2))
        self._live.update(Markdown(shown), refresh=True)
        self._drawn_at = time.monotonic()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_blocks(text: str) -> tuple[str, str]:
    """(complete blocks, the rest): cut at the last blank line that is followed by a line that is
    not indented, outside of fenced code.
    """
    fence, end, position, after_blank = "", 0, 0, False
    for line in text.splitlines(keepends=True):
        if not fence and after_blank and line.strip() and line[0] not in " \t":
            end = position
        fence = _fence_after(line, fence)
        after_blank = not fence and not line.strip()
        position += len(line)
    return text[:end], text[end:]


def _fence_after(line: str, fence: str) -> str:
    """The fence of code that is open after `line`, where `fence` was open before it; or ""."""
    if fence:
        marks = line.strip()
        return "" if marks.startswith(fence) and not marks.strip(fence[0]) else fence
    opening = _FENCE.match(line)
    return opening[1] if opening else ""


def last_lines(text: str, count: int) -> str:
    """The last lines of Markdown, in the code block that they are in."""
    lines, fence = text.splitlines(), ""
    for line in lines[:-count]:
        fence = _fence_after(line, fence)
    return "\n".join([fence, *lines[-count:]] if fence else lines[-count:])
