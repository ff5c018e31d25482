"""A table in the terminal: rich's on a terminal, aligned columns in a pipe.

Must not know: the meaning of the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()
) -> None:
    """Prints a table. `right` names the columns that are right-aligned (figures)."""
    if not sys.stdout.isatty():
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        for row in (header, *rows):
            cells = (
                cell.rjust(w) if name in right else cell.ljust(w)
                for cell, w, name in zip(row, widths, header, strict=True)
            )
            print("  ".join(cells).rstrip())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in header:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="fold",
            no_wrap=name != header[-1],
        )
    for row in rows:
        table.add_row(*map(Text, row))  # as Text: a name may contain rich markup
    Console().print(table)
