"""Generated pictures of many shapes, modes and file formats."""

from __future__ import annotations

import random
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

MODES = (
    *("RGB", "RGBA", "P", "P with a transparent color", "L", "LA", "1", "I;16", "CMYK", "YCbCr"),
    *("HSV", "I", "PA", "LAB", "F"),
)
SHAPES = (  # (width, height)
    *((1, 1), (1, 2), (2, 1), (3, 7), (16, 16), (31, 33), (50, 40), (100, 7), (7, 100), (199, 1)),
    *((1, 199), (224, 224), (255, 257), (448, 448), (640, 480), (1000, 100), (100, 1000)),
    *((1023, 1025), (1200, 1600), (60, 3000), (2000, 1500), (1540, 200)),
)


def make_picture(width: int, height: int, mode: str = "RGB", kind: int = 0) -> Image.Image:
    """kind: 0 noise, 1 gradients, 2 a pattern of two colors."""
    rng = np.random.default_rng(width * 10_007 + height)
    y, x = np.mgrid[0:height, 0:width]
    if kind == 0:
        pixels = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    elif kind == 1:
        planes = x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), x + y, x * 7
        pixels = np.stack(planes, -1)
    else:
        pixels = ((x // 5 + y // 3) % 2)[..., None] * np.array([255, 200, 90, 128])
    pixels = pixels.astype(np.uint8)
    rgb = Image.fromarray(np.ascontiguousarray(pixels[..., :3]))
    if mode in ("RGBA", "LA"):
        return Image.fromarray(pixels).convert(mode)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    if mode == "I":
        return Image.fromarray(pixels[..., 0].astype(np.int32))
    if mode == "PA":
        return rgb.quantize(16).convert("PA")
    if mode == "P with a transparent color":
        picture = rgb.quantize(32)
        picture.info["transparency"] = 3
        return picture
    return rgb.convert(mode)


def pictures(number: int) -> Iterator[Image.Image]:
    """Of all shapes, then of random ones; modes and kinds take turns."""
    chosen = random.Random(0)
    for i in range(number):
        size = SHAPES[i] if i < len(SHAPES) else (chosen.randint(1, 1400), chosen.randint(1, 1400))
        yield make_picture(*size, MODES[i % len(MODES)], i // 7 % 3)


def encoded(picture: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, format_, **options)
    return buffer.getvalue()
