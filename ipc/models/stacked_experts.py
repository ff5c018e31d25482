"""Experts that a checkpoint holds as one tensor per layer, in the names of transformers 5, where a
model's table of weights has a tensor per expert.

Must not know: files, tensors' values, torch, which architectures there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
# name of an expert's projection -> name of the layer's tensor, and whether it is the second half of
# an expert's rows there
_STACKS = {
    "gate_proj": (_GATE_UP, False),
    "up_proj": (_GATE_UP, True),
    "down_proj": (_DOWN, False),
    "w1": (_GATE_UP, False),
    "w3": (_GATE_UP, True),
    "w2": (_DOWN, False),
}
_RENAMED = (".block_sparse_moe.", ".mlp.")  # Mixtral's, in the form with stacked experts


class Piece(NamedTuple):
    """Where a weight lies in a stored tensor."""

    stored: str
    shape: list[int]  # of the whole tensor
    expert: int | None  # index along its first dimension; None: the weight is the whole tensor
    begin: int = 0  # first row within the expert
    end: int = 0


def stacked_pieces(shapes: Mapping[str, list[int]]) -> dict[str, Piece]:
    """Weight -> its piece of a stored tensor, for the names of `shapes` that have another form."""
    found = {name: match for name in shapes if (match := _EXPERT.fullmatch(name))}
    counts: dict[str, int] = {}
    for match in found.values():
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    pieces: dict[str, Piece] = {}
    for name, match in found.items():
        stack, is_second = _STACKS[match[3]]
        rows, columns = shapes[name]
        begin = rows if is_second else 0
        whole = [counts[match[1]], 2 * rows if stack == _GATE_UP else rows, columns]
        stored = f"{match[1]}.experts.{stack}".replace(*_RENAMED)
        pieces[name] = Piece(stored, whole, int(match[2]), begin, begin + rows)
    for name, shape in shapes.items():
        if name not in found and _RENAMED[0] in name:
            pieces[name] = Piece(name.replace(*_RENAMED), shape, None)
    return pieces
