"""Compares two traces: the parts of their steps, and each kernel that both have.

Must not know: where traces come from.
"""

from __future__ import annotations

import statistics

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .fold import FoldedKernel
from .recorded import RecordedTrace
from .tree import render

PARTS = ("schedule_s", "execute_s", "process_s")
COLUMNS = ("kernel", "shape", "calls A", "calls B", "median A", "median B", "B / A", "limit A, B")
# Kernels of the two traces are compared by name and shape, so that the implementation may differ.
Key = tuple[str, str, str]


def compare(a: RecordedTrace, b: RecordedTrace, width: int = 190) -> str:
    """Shows both traces side by side as plain text. Medians are in microseconds."""
    heading = Text(f"A: {_title(a)}\nB: {_title(b)}\n")
    return render(Group(heading, _parts(a, b), Text(), _kernels(a, b)), width)


def _title(trace: RecordedTrace) -> str:
    engine = trace.recorded
    return (
        f"{engine.model.rstrip('/').rpartition('/')[2]}, {engine.dtype}, {engine.implementation}, "
        f"{len(engine.steps)} steps"
    )


def _parts(a: RecordedTrace, b: RecordedTrace) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("median of a step, ms", "A", "B", "B / A"):
        table.add_column(column, justify="left" if "median" in column else "right")
    for part in PARTS:
        medians = [
            1e3 * statistics.median([getattr(step, part) for step in trace.steps] or [0.0])
            for trace in (a, b)
        ]
        table.add_row(part.removesuffix("_s"), *(f"{ms:.3f}" for ms in medians), _ratio(*medians))
    return table


def _kernels(a: RecordedTrace, b: RecordedTrace) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        side = "left" if column in COLUMNS[:2] else "right"
        table.add_column(column, justify=side, no_wrap=side == "right", overflow="fold")
    of_a, of_b = _by_key(a), _by_key(b)
    for key in of_a | of_b:
        pair = of_a.get(key), of_b.get(key)
        medians = [1e6 * one.median_s if one else 0.0 for one in pair]
        table.add_row(
            f"{key[0] or 'step'} → {key[1]}",
            key[2],
            *(str(one.count) if one else "-" for one in pair),
            *(f"{us:.1f}" if one else "-" for one, us in zip(pair, medians)),
            _ratio(*medians) if all(pair) else "only A" if pair[0] else "only B",
            ", ".join(f"{one.fraction:.0%}" if one else "-" for one in pair),
        )
    return table


def _by_key(trace: RecordedTrace) -> dict[Key, FoldedKernel]:
    return {(one.module, one.op, one.shape): one for one in trace.kernels()}


def _ratio(a: float, b: float) -> str:
    return f"{b / a:.2f}" if a else ""
