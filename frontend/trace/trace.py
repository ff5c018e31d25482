"""Trace: the recorded steps of an engine, in each form of output.

Must not know: how a step is recorded, clients.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .recorded import RecordedTrace


class Trace(RecordedTrace):
    """The recorded steps. There are none until the context of `LLM.trace` ends."""

    def tree(self, width: int = 190) -> str:
        """Returns the path of the tokens as plain text, in lines of at most `width` columns."""
        from .tree import render, tree_of

        return render(tree_of(self, width), width)

    def to_perfetto(self, path: str | Path) -> None:
        """Writes a file for ui.perfetto.dev or chrome://tracing."""
        from .perfetto import chrome_trace

        Path(path).write_bytes(msgspec.json.encode(chrome_trace(self)))

    def to_html(self, path: str | Path) -> None:
        """Writes one file that a browser shows without a network."""
        from .html import page

        Path(path).write_text(page(self), encoding="utf-8")
