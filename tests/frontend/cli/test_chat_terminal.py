"""The line editor of `quire chat` and its Markdown: blocks, escapes, a private history."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from quire.frontend.cli.chat_terminal import (
    MarkdownDisplay,
    PlainDisplay,
    history_file,
    last_lines,
    make_editor,
    open_history,
    split_blocks,
)


@pytest.mark.parametrize(
    ("keys", "turn"),
    [
        ("hello\r", "hello"),
        ("hello\n", "hello"),
        ("a\x1b\rb\r", "a\nb"),
        ("a\\\rb\r", "a\nb"),
        ("\x1b[200~a\r\nb\rc\x1b[201~\r", "a\nb\nc"),
        ("\x1b[200~a\n\n  b\n\x1b[201~ c\r", "a\n\n  b\n c"),
        ("/cle\t\r", "/clear"),
    ],
)
def test_key_bindings(keys: str, turn: str) -> None:
    with create_pipe_input() as typed:
        editor = make_editor(
            InMemoryHistory(), ["/clear", "/exit"], input=typed, output=DummyOutput()
        )
        typed.send_text(keys)
        assert editor.prompt() == turn


def test_history_is_kept_in_a_private_file(tmp_path: Path) -> None:
    notices: list[str] = []
    path = tmp_path / "state" / "quire" / "chat_history"
    open_history(path, notices.append).store_string("first\nturn")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)  # for example, of an earlier program
    history = open_history(path, notices.append)
    assert list(history.load_history_strings()) == ["first\nturn"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and notices == []
    assert isinstance(history, FileHistory)


def test_an_unwritable_history_is_reported(tmp_path: Path) -> None:
    notices: list[str] = []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "chat_history", tmp_path):
        assert isinstance(open_history(path, notices.append), InMemoryHistory)
    assert len(notices) == 2 and all("history is not kept: " in notice for notice in notices)


def test_the_history_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert history_file() == Path("/s/quire/chat_history")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert history_file() == Path.home() / ".local/state/quire/chat_history"


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one", ""),
        ("one\n\n", ""),  # an indented line might follow
        ("one\n\nt", "one\n\n"),
        ("- a\n\n  more\n\n- b", "- a\n\n  more\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("````\n```\n\nb\n", ""),
        ("~~~\n```\n\nb\n~~~\n\nc", "~~~\n```\n\nb\n~~~\n\n"),
    ],
)
def test_blocks_end_where_markdown_ends_them(text: str, complete: str) -> None:
    assert split_blocks(text) == (complete, text[len(complete) :])


def test_the_last_lines_stay_in_their_code_block() -> None:
    assert last_lines("a\nb\nc", 2) == "b\nc"
    assert last_lines("a\n```py\nb\nc\nd", 2) == "```\nc\nd"
    assert last_lines("```\nb\n```\nc\nd", 2) == "c\nd"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_markdown_is_rendered_and_escape_sequences_are_removed() -> None:
    out = Tty()
    display = MarkdownDisplay(out, io.StringIO())
    text = "# Title\n\nSome **bold** text\x1b]0;owned\x07\n\n```\ncode **not bold**\n```\n"
    for i in range(0, len(text), 3):
        display.write(text[i : i + 3])
    display.end()
    shown = out.getvalue()
    assert "Title" in shown and "**bold**" not in shown and "code **not bold**" in shown
    assert "\x1b[1m" in shown and "\x1b]0;" not in shown and "\x07" not in shown
    display.notice("a notice")
    assert "\x1b[2ma notice" in out.getvalue()


def test_plain_text_is_printed_as_it_is() -> None:
    out, err = io.StringIO(), io.StringIO()
    display = PlainDisplay(out, err)
    for piece in ("**a", "**\n"):
        display.write(piece)
    display.end()
    display.notice("a notice")
    display.error("an error")
    assert (out.getvalue(), err.getvalue()) == ("**a**\n\n", "a notice\nquire: an error\n")


def test_reasoning_is_dim_on_a_terminal_and_left_out_elsewhere() -> None:
    tty, pipe = Tty(), io.StringIO()
    for out in (tty, pipe):
        display = PlainDisplay(out, io.StringIO())
        for piece in ("H\x07", "m."):
            display.write_reasoning(piece)
        for piece in ("Ye", "s."):
            display.write(piece)
        display.end()
        display.write_reasoning("Hm.")  # and nothing else
        display.end()
    dim = "\x1b[2m{}\x1b[0m".format
    assert tty.getvalue() == f"{dim('H')}{dim('m.')}\n\nYes.\n{dim('Hm.')}\n\n\n"
    assert pipe.getvalue() == "Yes.\n\n"
    out = Tty()
    display = MarkdownDisplay(out, io.StringIO())
    display.write_reasoning("Hm.")
    display.write("**Yes**")
    display.end()
    assert out.getvalue().startswith(f"{dim('Hm.')}\n\n") and "**" not in out.getvalue()
