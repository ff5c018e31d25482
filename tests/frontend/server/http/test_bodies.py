"""Invalid bodies, and unknown fields at any depth."""

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta
from quire.frontend.server.http.bodies import decode
from quire.frontend.server.http.errors import ApiError


class Circle(msgspec.Struct, tag_field="kind", tag="circle"):
    radius: Annotated[float, Meta(gt=0)]


class Label(msgspec.Struct):
    text: str


class Square(msgspec.Struct, tag_field="kind", tag="square"):
    side: int
    labels: list[Label] | None = None


class Body(msgspec.Struct, kw_only=True):
    shapes: Annotated[list[Circle | Square], Meta(min_length=1)]
    weights: dict[str, float] | None = None
    mode: Literal["a", "b"] | None = None
    label: str | Label | None = None


CIRCLE = {"kind": "circle", "radius": 1}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "shapes", "missing_required_parameter"),
        ({"shapes": []}, "shapes", "empty_array"),
        ({"shapes": 3}, "shapes", "invalid_type"),
        (
            {"shapes": [CIRCLE, {"kind": "circle"}]},
            "shapes[1].radius",
            "missing_required_parameter",
        ),
        ({"shapes": [{"kind": "oval"}]}, "shapes[0].kind", "invalid_value"),
        ({"shapes": [{"radius": 1}]}, "shapes[0].kind", "missing_required_parameter"),
        ({"shapes": [CIRCLE | {"radius": 0}]}, "shapes[0].radius", "decimal_below_min_value"),
        (
            {"shapes": [{"kind": "square", "side": 1, "labels": [{"text": 1}]}]},
            "shapes[0].labels[0].text",
            "invalid_type",
        ),
        ({"shapes": [CIRCLE], "weights": {"x": "heavy"}}, "weights", "invalid_type"),
        ({"shapes": [CIRCLE], "mode": "c"}, "mode", "invalid_value"),
    ],
)
def test_the_path_and_kind_of_an_error(fields: dict, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(msgspec.json.encode(fields), Body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (
        400,
        param,
        code,
    ) and param in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"{", b'{"mode": "\xff"}', b"nul"])
def test_invalid_json(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode(raw, Body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_excessive_nesting_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        decode(b'{"shapes": [], "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", Body)
    assert caught.value.status == 400


def test_unknown_fields_are_found_with_their_paths() -> None:
    square = {
        "kind": "square",
        "side": 1,
        "labels": [{"text": "a"}, {"text": "b", "color": 1}],
        "depth": 2,
    }
    body = {
        "shapes": [CIRCLE, square],
        "weights": {"anything": 1},
        "label": {"text": "x", "size": 3},
        "zeta": None,
    }
    _, unknown = decode(msgspec.json.encode(body), Body)
    assert unknown == ["label.size", "shapes[1].depth", "shapes[1].labels[1].color", "zeta"]
    assert decode(msgspec.json.encode(body), Body, find_unknown=False)[1] == []
    assert decode(msgspec.json.encode({"shapes": [CIRCLE], "label": "x"}), Body)[1] == []
