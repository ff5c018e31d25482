"""What layers keep of a request beside keys and values: states of fixed size, as pure arithmetic.

Must not know: torch, models, requests, how much memory there is.

A place has the states of one request in all layers, one after another, each part aligned. Requests
that run have the places of their slots; checkpoints have the places after these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ALIGNMENT = 64  # bytes


class StatePart(NamedTuple):
    """One tensor of a layer's state."""

    shape: tuple[int, ...]
    is_fp32: bool  # else of the model's dtype

    def num_bytes(self, itemsize: int) -> int:
        """itemsize: bytes of a number of the model's dtype."""
        return math.prod(self.shape) * (4 if self.is_fp32 else itemsize)


def place_parts(parts: Iterable[StatePart], itemsize: int) -> tuple[list[int], int]:
    """The offset of each part in a place, and the size of a place, in bytes."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.num_bytes(itemsize) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def state_bytes(layers: Iterable[Sequence[StatePart]], itemsize: int) -> int:
    """Bytes of the states of one request, whose layers have these parts."""
    return place_parts((part for parts in layers for part in parts), itemsize)[1]
