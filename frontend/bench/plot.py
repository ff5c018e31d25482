"""A line chart as SVG with logarithmic axes, to show how a cost grows.

Must not know: what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 70, 190, 40, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
MIDDLE = 'text-anchor="middle"'


def line_chart(title: str, x_name: str, y_name: str, lines: Mapping[str, Points]) -> str:
    """Returns the chart as SVG. `lines` maps names to points, all positive. A name that ends in
    "limit" is dashed.
    """
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    if not xs or min(xs) <= 0 or min(ys) <= 0:
        raise ValueError("a chart with logarithmic axes needs points, and all of them positive")
    x_of, y_of = _scale(xs, LEFT, WIDTH - RIGHT), _scale(ys, HEIGHT - BOTTOM, TOP)
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, HEIGHT / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, title, 'font-size="14"'),
        _text(middle_x, HEIGHT - 12, x_name, MIDDLE),
        _text(16, middle_y, y_name, f'{MIDDLE} transform="rotate(-90 16 {middle_y})"'),
    ]
    for x in sorted(set(xs)):
        parts.append(_grid_line(x_of(x), x_of(x), TOP, HEIGHT - BOTTOM))
        parts.append(_text(f"{x_of(x):.1f}", HEIGHT - BOTTOM + 16, f"{x:g}", MIDDLE))
    for y in _ticks(min(ys), max(ys)):
        parts.append(_grid_line(LEFT, WIDTH - RIGHT, y_of(y), y_of(y)))
        parts.append(_text(LEFT - 6, f"{y_of(y) + 4:.1f}", f"{y:.3g}", 'text-anchor="end"'))
    for i, (name, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="5 4"' if name.endswith("limit") else ""
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in sorted(points))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 18 * i + 12, name, f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float | str, y: float | str, content: str, attributes: str) -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escape(content)}</text>'


def _grid_line(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="#eeeeee"/>'


def _scale(values: Sequence[float], start: float, end: float):
    """Maps a value to its place on an axis from `start` to `end`, both included."""
    least, span = math.log(min(values)), math.log(max(values)) - math.log(min(values))
    return lambda value: start + (end - start) * ((math.log(value) - least) / span if span else 0.5)


def _ticks(least: float, most: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten within the range, or the ends of the range if these
    are too few.
    """
    exponents = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    ticks = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    within = [tick for tick in ticks if least <= tick <= most]
    return within if len(within) >= 2 else sorted({least, most})
