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


def line_chart(title: str, x_name: str, y_name: str, lines: Mapping[str, Points]) -> str:
    """`lines`: name -> points, all positive. A name that ends in "limit" is dashed."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    if not xs or min(xs) <= 0 or min(ys) <= 0:
        raise ValueError("a chart with logarithmic axes needs points, and all of them positive")
    x_of, y_of = _scale(xs, LEFT, WIDTH - RIGHT), _scale(ys, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" '
        f'text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="16" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 '
        f'{HEIGHT / 2})">{escape(y_name)}</text>',
    ]
    for x in sorted(set(xs)):
        parts.append(
            f'<line x1="{x_of(x):.1f}" x2="{x_of(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
            f'stroke="#eeeeee"/>'
        )
        parts.append(
            f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
        )
    for y in _ticks(min(ys), max(ys)):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}" '
            f'stroke="#eeeeee"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    for i, (name, points) in enumerate(lines.items()):
        colour, dash = (
            COLOURS[i % len(COLOURS)],
            ' stroke-dasharray="5 4"' if name.endswith("limit") else "",
        )
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in sorted(points))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 18 * i + 12}" '
            f'fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _scale(values: Sequence[float], start: float, end: float):
    """Maps a value to its place on an axis from `start` to `end`, both included."""
    least, span = math.log(min(values)), math.log(max(values)) - math.log(min(values))
    return lambda value: start + (end - start) * ((math.log(value) - least) / span if span else 0.5)


def _ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range; the ends of the range if these are too
    few.
    """
    exponents = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    ticks = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    within = [tick for tick in ticks if least <= tick <= most]
    return within if len(within) >= 2 else sorted({least, most})
