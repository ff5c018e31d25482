"""What becomes of a picture: which resized parts are the inputs of the encoder, and which tokens
stand for them.

Must not know: models, tokenizers, files. families.py makes layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from PIL import Image


MAX_BETWEEN = 2**26  # pixels


class Resize(NamedTuple):
    height: int
    width: int


class Crop(NamedTuple):
    """What lies beyond the picture is left out."""

    top: int
    left: int
    height: int
    width: int


Steps = tuple[Resize | Crop, ...]


class Part(NamedTuple):
    """An input of the encoder: the steps that make it of the picture, and the (rows, columns) of
    the encoder's result.
    """

    steps: Steps
    grid: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_bytes(self) -> int:
        last = self.steps[-1]
        return last.height * last.width * 3


class Run(NamedTuple):
    """`length` places of the part `part`, the next ones in reading order."""

    part: int
    length: int


class Layout(msgspec.Struct, frozen=True):
    """`text` takes the place of the placeholder in a prompt. In it the token whose place a row of
    the encoder takes is written once for each element of `runs`, whose lengths say how many of them
    follow one another.
    """

    parts: list[Part]
    text: str
    runs: list[list[Run]]

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def cut(picture: Image.Image, all_steps: Sequence[Steps], resample: int) -> list[Image.Image]:
    """The pictures that the steps make; steps that several begin with are taken once.

    `resample`: the filter, a key of resampling.FILTERS.
    """
    made: dict[Steps, Image.Image] = {(): picture}
    for steps in all_steps:
        for end in range(1, len(steps) + 1):
            if steps[:end] in made:
                continue
            before, step = made[steps[: end - 1]], steps[end - 1]
            if isinstance(step, Resize):
                after = resized(before, step, resample)
            else:
                right, bottom = step.left + step.width, step.top + step.height
                box = (step.left, step.top, min(right, before.width), min(bottom, before.height))
                after = before.crop(box)
            made[steps[:end]] = after
    return [made[steps] for steps in all_steps]


def resized(picture: Image.Image, size: Resize, resample: int) -> Image.Image:
    """First along the rows, then along the columns, as torchvision does.

    Values are rounded and clipped in between, so that the order matters at sharp edges. Only a
    picture that would become very large goes the other way.
    """
    from .resampling import resample as resampled

    if size.width * picture.height > MAX_BETWEEN:
        picture = resampled(picture, size.height, picture.width, resample)
    return resampled(picture, *size, resample)


def tiles(height: int, width: int, tile: int) -> list[Crop]:
    """The squares of side `tile` that a picture of these sides consists of, row by row."""
    return [
        Crop(top, left, tile, tile)
        for top in range(0, height, tile)
        for left in range(0, width, tile)
    ]
