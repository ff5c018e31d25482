"""Pictures in another size: the resampling of torch and torchvision for bytes, bit by bit.

Must not know: models, layouts, files.

The values of a row are weighted sums of its old ones, rounded to bytes; then those of the columns.
Weights are numbers of 16 bits over a power of two, as in Pillow-SIMD and
torch.nn.functional.interpolate(antialias=True). Sums are exact in float64, so that a product of
matrices gives the same bits on every machine. Pillow itself has weights of 24 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

Weights = Callable[[np.ndarray], np.ndarray]
WEIGHT_BITS, MAX_SHIFT = 15, 22
BLOCK = 16  # new values whose weights are one matrix
PRODUCT = 2**18  # multiplications that BLAS does in one thread: others belong to the engine
MAX_ROWS = 64


def _linear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution with a = -0.5."""
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((x - 5) * x + 8) * x * -0.5 + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


# member of PIL.Image.Resampling -> how far a weight reaches, and its function
FILTERS: dict[int, tuple[int, Weights]] = {1: (3, _lanczos), 2: (1, _linear), 3: (2, _cubic)}


def resample(picture: Image.Image, height: int, width: int, kind: int) -> Image.Image:
    """The RGB picture in another size. `kind`: a key of FILTERS."""
    from PIL import Image

    planes = []
    for channel in range(3):
        plane = np.asarray(picture.getchannel(channel))
        plane = _along_rows(plane, width, kind)
        planes.append(_along_rows(np.ascontiguousarray(plane.T), height, kind).T)
    return Image.fromarray(np.stack(planes, -1))


def _along_rows(plane: np.ndarray, length: int, kind: int) -> np.ndarray:
    """plane u8 [rows, old length] -> u8 [rows, length]"""
    num_rows, old = plane.shape
    if old == length:
        return plane
    blocks = _blocks(old, length, kind)
    widest = max(len(weights) for _, weights in blocks)
    step = max(1, min(MAX_ROWS, PRODUCT // (BLOCK * widest)))
    result = np.empty((num_rows, length), np.uint8)
    for top in range(0, num_rows, step):
        values = plane[top : top + step].astype(np.float64)
        sums = np.empty((len(values), length))
        for i, (first, weights) in enumerate(blocks):
            taken = values[:, first : first + len(weights)]
            np.matmul(taken, weights, out=sums[:, i * BLOCK : i * BLOCK + weights.shape[1]])
        sums += 0.5
        result[top : top + step] = np.clip(sums, 0, 255, out=sums)
    return result


def _blocks(old: int, length: int, kind: int) -> list[tuple[int, np.ndarray]]:
    """For each BLOCK new values the first old one that they read, and weights f64 [old values, new
    values], each a multiple of the same power of two.
    """
    reach, weight_of = FILTERS[kind]
    scale = old / length
    stretch = max(scale, 1.0)
    centers = scale * (np.arange(length) + 0.5)
    firsts = np.maximum((centers - reach * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + reach * stretch + 0.5).astype(np.int64), old)
    places = firsts[:, None] + np.arange((ends - firsts).max())
    weights = weight_of((places - centers[:, None] + 0.5) / stretch) * (places < ends[:, None])
    weights /= weights.sum(1, keepdims=True)
    most, shift = weights.max(), 0
    while shift < MAX_SHIFT and int(0.5 + most * 2 ** (shift + 1)) < 2**WEIGHT_BITS:
        shift += 1
    weights = np.trunc(weights * 2.0**shift + np.copysign(0.5, weights)) / 2.0**shift
    blocks = []
    for start in range(0, length, BLOCK):
        chosen: Any = slice(start, start + BLOCK)
        first, end = int(firsts[start]), int(ends[chosen][-1])
        matrix = np.zeros((end - first + weights.shape[1], len(firsts[chosen])))
        rows = places[chosen] - first
        matrix[rows, np.arange(len(rows))[:, None]] = weights[chosen]
        blocks.append((first, np.ascontiguousarray(matrix[: end - first])))
    return blocks
