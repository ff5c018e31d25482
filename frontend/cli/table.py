"""A table in the terminal: rich's where somebody looks at it, aligned columns where a program reads
it.

Must not know: what the rows are about.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()
) -> None:
    """`right`: names of columns of figures, which are aligned to the right."""
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
        table.add_row(*map(Text, row))  # as Text: a name may hold what rich takes for its markup
    Console().print(table)
