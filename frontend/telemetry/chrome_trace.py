"""Events of the Trace Event Format (JSON), which Perfetto and chrome://tracing show.

Must not know: what is traced.

Times are microseconds. A process (`pid`) has rows (`tid`); the events of a row must be nested.
"""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def label(kind: str, pid: int, row: int, **args: str | int) -> Event:
    """Returns an event that names or sorts a process or a row. `kind` is "process_name" or
    "thread_name" with `name`, or "thread_sort_index".
    """
    return {"name": kind, "ph": "M", "pid": pid, "tid": row, "args": args}


def event(
    name: str,
    category: str,
    pid: int,
    row: int,
    begin_us: float,
    end_us: float | None = None,
    **args: Any,
) -> Event:
    """Returns a span ("X", complete) or, without an end, a moment ("i", instant)."""
    common = {
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": row,
        "ts": round(begin_us, 3),
        "args": args,
    }
    if end_us is not None:
        return common | {"ph": "X", "dur": round(max(0.0, end_us - begin_us), 3)}
    return common | {"ph": "i", "s": "t"}
