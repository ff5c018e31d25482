"""The terminal view of a conversation: the line editor with its history, and answers rendered as
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

from ...ipc.own_files import user_state
from .terminal import Dim

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

PROMPT = "> "
REFRESH_S = 0.06  # interval between redraws of an unfinished paragraph
# Control characters are removed: a model could move the cursor or change the terminal's title.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


def history_file() -> Path:
    """Returns the path in the user's state directory."""
    return user_state() / "chat_history"


def open_history(path: Path, notice: Any) -> History:
    """Returns the turns of earlier sessions, in a file that only its owner can read (mode 0600).

    If the file is not writable, `notice` is called with a sentence, and the history is kept for
    this session only.
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
    """Returns an editor that reads one turn. Enter sends it, Alt-Enter or a trailing backslash
    begins a new line, and pasted text keeps its lines. `options`: arguments of PromptSession.
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
        output.enable_cpr = False  # some terminals do not report the cursor position
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
    """Prints an answer as it arrives."""

    def __init__(self, out: TextIO, err: TextIO):
        self.out, self.err, self.dim = out, err, Dim(out)
        self._has_reasoning = False  # reasoning is on the screen before the answer

    def write(self, text: str) -> None:
        self._end_reasoning()
        print(text, end="", file=self.out, flush=True)

    def write_reasoning(self, text: str) -> None:
        """Shows the reasoning only on a terminal. Any other file gets the answer alone."""
        if self.out.isatty():
            self._has_reasoning = True
            print(self.dim(_CONTROL.sub("", text)), end="", file=self.out, flush=True)

    def _end_reasoning(self) -> None:
        if self._has_reasoning:
            self._has_reasoning = False
            print("\n", file=self.out, flush=True)

    def end(self) -> None:
        self._end_reasoning()
        print(file=self.out, flush=True)

    def notice(self, text: str) -> None:
        print(self.dim(text), file=self.out if self.out.isatty() else self.err, flush=True)

    def error(self, text: str) -> None:
        print(f"quire: {text}", file=self.err, flush=True)


class MarkdownDisplay(PlainDisplay):
    """Renders Markdown. Complete blocks are printed once; the unfinished block is redrawn as it
    grows.
    """

    def __init__(self, out: TextIO, err: TextIO):
        from rich.console import Console

        super().__init__(out, err)
        self.console = Console(file=out, highlight=False)
        self._pending = ""  # part of the answer that is not yet printed permanently
        self._live: Any = None
        self._drawn_at = 0.0

    def write(self, text: str) -> None:
        self._end_reasoning()
        self._pending += _CONTROL.sub("", text)
        block, rest = split_blocks(self._pending)
        if block:
            self._print(block)
            self._pending = rest
        if time.monotonic() - self._drawn_at >= REFRESH_S:
            self._draw()

    def end(self) -> None:
        self._end_reasoning()
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
        # lines above the top of the screen cannot be erased
        shown = last_lines(self._pending, max(1, self.console.height // 2))
        self._live.update(Markdown(shown), refresh=True)
        self._drawn_at = time.monotonic()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def split_blocks(text: str) -> tuple[str, str]:
    """Returns (complete blocks, the rest). The split is at the last blank line that is outside of
    fenced code and followed by a line without indentation.
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
    """Returns the code fence that is open after `line`, or "". `fence` is the fence that was open
    before it.
    """
    if fence:
        marks = line.strip()
        return "" if marks.startswith(fence) and not marks.strip(fence[0]) else fence
    opening = _FENCE.match(line)
    return opening[1] if opening else ""


def last_lines(text: str, count: int) -> str:
    """Returns the last lines of Markdown text. A code block that is cut keeps its fence."""
    lines, fence = text.splitlines(), ""
    for line in lines[:-count]:
        fence = _fence_after(line, fence)
    return "\n".join([fence, *lines[-count:]] if fence else lines[-count:])
