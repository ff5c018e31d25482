"""The view of `quire top`: one observation of an engine as rich's tables and bars.

Must not know: HTTP, keys, when it is shown.
"""

from __future__ import annotations

import re
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

WINDOW_S = 2.0  # interval over which rates are computed
SCHEDULE, EXECUTE, PROCESS, PREFILL, DECODE = range(2, 7)  # columns of a step
STATES = {"swapped": "swapped out", "held": "paused", "grammar": "grammar"}
USED, CACHED, OUTPUT, REST = "blue", "cyan", "yellow", "bright_black"


def rates(state: dict[str, Any]) -> tuple[float, float, float]:
    """Returns output tokens, prompt tokens and steps per second over the last WINDOW_S. They are
    computed from the steps, so one observation suffices.

    If the history of steps is shorter than WINDOW_S, its length is used.
    """
    steps = [step for step in state["steps"] if step[1] > state["time"] - WINDOW_S]
    if not steps:
        return 0.0, 0.0, 0.0
    is_cut = len(steps) == len(state["steps"]) and len(steps) > 1
    span_s = max(state["time"] - steps[0][1], 1e-3) if is_cut else WINDOW_S
    return (
        sum(step[DECODE] for step in steps) / span_s,
        sum(step[PREFILL] for step in steps) / span_s,
        len(steps) / span_s,
    )


def screen(
    state: dict[str, Any], url: str, *, width: int, height: int | None = None
) -> RenderableType:
    """Returns the whole view. `height` is the number of available lines, or None for no limit."""
    # lines above, headlines, and a line that counts what is omitted
    most = None if height is None else max(1, height - 11)
    return Group(
        _headline(state, url),
        Text(),
        _figures(state),
        _cache(state, width),
        _steps(state, width),
        Text(),
        _requests(state, width, most),
    )


def trouble(url: str, sentence: str) -> RenderableType:
    """Returns what is shown while there is no observation."""
    return Group(
        Text.assemble(("quire top  ", "bold"), (url, "dim")),
        Text(),
        Text(sentence, "red"),
        Text("Retrying; q exits.", "dim"),
    )


def _headline(state: dict[str, Any], url: str) -> Text:
    up = int(state["uptime_s"])
    shown = f"{up // 3600} h {up // 60 % 60} min" if up >= 3600 else f"{up // 60} min {up % 60} s"
    return Text.assemble(
        ("quire top  ", "bold"), (str(state["model"]), "bold cyan"), (f"  {url}  up {shown}", "dim")
    )


def _figures(state: dict[str, Any]) -> Table:
    counters, requests = state["counters"], state["requests"]
    num_running = sum(request["state"] == "running" for request in requests)
    output, prompt, steps = rates(state)
    queries, hits = counters["prefix_cache_queries"], counters["prefix_cache_hits"]
    grid = Table.grid(Column(min_width=22), Column(min_width=22), Column(), padding=(0, 3))
    grid.add_row(
        _figure(output, "output tokens/s"),
        _figure(prompt, "prompt tokens/s"),
        _figure(steps, "steps/s"),
    )
    grid.add_row(
        _figure(num_running, "running"),
        _figure(len(requests) - num_running + state["num_queued"], "waiting"),
        _figure(counters["num_preemptions"], "preemptions"),
    )
    share = f"{100 * hits / queries:.0f} %" if queries else "-"
    prefix_hits = Text.assemble((share, "bold"), " prefix hits")
    grid.add_row(prefix_hits, _figure(finished(counters), "finished"), Text())
    return grid


def finished(counters: dict[str, int]) -> int:
    return sum(n for name, n in counters.items() if name.startswith("num_finished"))


def _figure(n: float, words: str) -> Text:
    return Text.assemble((f"{n:,.0f}", "bold"), f" {words}")


def _cache(state: dict[str, Any], width: int) -> Text:
    """Shows the blocks that requests hold and those in the prefix cache, without the null block."""
    counts = state["block_counts"]
    num_blocks = max(1, sum(counts.values()))
    used, cached = counts["used"] + counts["shared"], counts["cached"]
    counters = state["counters"]
    num_usable = counters["num_blocks"] - 1
    usage = 1 - counters["num_free_blocks"] / num_usable if num_usable > 0 else 0.0
    bar = _bar(width - 42, [(used / num_blocks, USED), (cached / num_blocks, CACHED)])
    return Text.assemble(
        "KV cache ",
        bar,
        (f" {100 * usage:.0f} %", "bold"),
        f" of {num_usable:,} blocks in use",
    )


def _steps(state: dict[str, Any], width: int) -> Text:
    """Shows the mean of the last 100 steps, and its parts as shares."""
    steps = state["steps"][-100:]
    if not steps:
        return Text("steps    none yet", "dim")
    parts = [
        sum(step[column] for step in steps) / len(steps) for column in (SCHEDULE, EXECUTE, PROCESS)
    ]
    whole = sum(parts) or 1.0
    colours = ("magenta", USED, "green")
    shares = [(part / whole, colour) for part, colour in zip(parts, colours, strict=True)]
    line = Text.assemble("step     ", _bar(max(10, width - 70), shares))
    for part, colour, name in zip(parts, colours, ("schedule", "execute", "process"), strict=True):
        line.append_text(Text.assemble(("  ■ ", colour), f"{name} {seconds(part)}"))
    return line


def _requests(state: dict[str, Any], width: int, most: int | None) -> RenderableType:
    # otherwise in order of arrival
    requests = sorted(state["requests"], key=lambda request: request["state"] != "running")
    if not requests:
        return Text("No requests.", "dim")
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=False)
    for name in ("request", "state", "prompt", "", "output", "", "blocks"):
        is_figure = name in ("prompt", "output", "blocks")
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=True)
    bar_width = max(4, min(28, (width - 72) // 2))
    for request in requests[:most]:
        num_prompt, num_output = request["num_prompt_tokens"], request["num_output_tokens"]
        limit = request["max_tokens"] or max(1, state["max_model_len"] - num_prompt)
        computed = min(request["num_computed_tokens"], num_prompt)
        cached = min(request["num_cached_tokens"], computed)
        prefill = [(cached / num_prompt, CACHED), ((computed - cached) / num_prompt, USED)]
        table.add_row(
            Text(short_id(request["request_id"])),  # as Text: it may contain rich markup
            Text(_doing(request)),
            f"{computed:,}/{num_prompt:,}",
            _bar(bar_width, prefill),
            f"{num_output:,}/{limit:,}",
            _bar(bar_width, [(num_output / limit, OUTPUT)]),
            f"{request['num_blocks']:,}",
        )
    num_left_out = len(requests) - len(requests[:most]) + state["num_queued"]
    return Group(table, Text(f"and {num_left_out:,} more", "dim")) if num_left_out else table


def _doing(request: dict[str, Any]) -> str:
    state: str = request["state"]
    if state != "running":
        return STATES.get(state, state)
    return "prefill" if request["num_computed_tokens"] < request["num_prompt_tokens"] else "decode"


def short_id(engine_id: str) -> str:
    """Returns the distinctive part of a request id: "cmpl-0123456789abcdef01234567-3-<16 hex>" ->
    "01234567-3"; one of n completions "1_…" -> "….1".
    """
    child = re.match(r"(\d+)_", engine_id)
    name = re.sub(r"^\d+_|-[0-9a-f]{16}$", "", engine_id)
    if match := re.fullmatch(r"(?:[a-z]+[-_])?([0-9a-f]{8})[0-9a-f]{4,}(-\d+)?", name):
        name = match[1] + (match[2] or "")
    elif len(name) > 16:
        name = name[:15] + "…"
    return f"{name}.{child[1]}" if child else name


def seconds(s: float) -> str:
    return f"{s * 1e6:.0f} µs" if s < 1e-4 else f"{s * 1e3:.1f} ms" if s < 0.1 else f"{s:.2f} s"


def _bar(width: int, parts: list[tuple[float, str]]) -> Text:
    """Shows shares of a whole as colored characters, from the left. A share above zero gets at
    least one character.
    """
    bar, width = Text(), max(1, width)
    for share, colour in parts:
        num_chars = min(width - len(bar), max(1 if share > 0 else 0, round(share * width)))
        bar.append("█" * num_chars, colour)
    return bar.append("░" * (width - len(bar)), REST)
