"""The line chart: well-formed, every point inside, larger values further along."""

import xml.etree.ElementTree as ElementTree

import pytest
from quire.frontend.bench.plot import HEIGHT, WIDTH, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in found
    ]


def test_points_lie_in_order_and_inside() -> None:
    svg = line_chart(
        "a < b & c",
        "x",
        "ms",
        {"decode": [(64, 8.0), (1, 0.5)], "decode, limit": [(1, 0.4), (64, 6.0)]},
    )
    measured, limit = polylines(svg)
    # to the right and upwards
    assert measured[0][0] < measured[1][0] and measured[0][1] > measured[1][1]
    assert limit[0][1] > measured[0][1]  # the smaller value lies below
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for line in (measured, limit) for x, y in line)
    assert svg.count("stroke-dasharray") == 1 and "a &lt; b &amp; c" in svg


def test_one_point_and_none() -> None:
    assert len(polylines(line_chart("", "x", "y", {"a": [(1, 1.0)]}))) == 1
    for bad in ({}, {"a": [(0, 1.0)]}, {"a": [(1, -1.0)]}):
        with pytest.raises(ValueError, match="positive"):
            line_chart("", "x", "y", bad)
