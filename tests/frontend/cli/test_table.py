"""Tables: aligned plain columns for programs, rich's tables for people, and unchanged
cell texts.
"""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from quire.frontend.cli.table import print_table


def test_columns_are_aligned(capsys: pytest.CaptureFixture) -> None:
    print_table(("name", "size"), [("a", "10"), ("longer name", "5")], right=frozenset({"size"}))
    assert capsys.readouterr().out == "name         size\na              10\nlonger name     5\n"
    print_table(("name", "size"), [])
    assert capsys.readouterr().out == "name  size\n"


def test_on_a_terminal_markup_in_a_cell_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    print_table(("name",), [("[bold]x[/bold]",)])
    assert "[bold]x[/bold]" in terminal.getvalue() and "─" in terminal.getvalue()


def test_rich_is_not_imported_for_a_pipe() -> None:
    code = (
        "import sys; from quire.frontend.cli.table import print_table; print_table(('a',), "
        "[('b',)]); print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["a", "b", "False"]
