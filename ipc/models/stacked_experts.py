"""Experts that a checkpoint holds as one tensor per layer, in the names of transformers 5, where a
model's table of weights has a tensor per expert.

Must not know: files, tensors' values, torch, which architectures there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.(weight|bias)")
_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"
_GRANITE_GATE_UP, _GRANITE_DOWN = "input_linear.weight", "output_linear.weight"
_PAIRS = (_GATE_UP, _GRANITE_GATE_UP)  # of two projections
# name of an expert's projection -> name of the layer's tensor, and whether it is the second half of
# an expert's rows there
_STACKS = {
    "gate_proj": (_GATE_UP, False),
    "up_proj": (_GATE_UP, True),
    "down_proj": (_DOWN, False),
    "w1": (_GATE_UP, False),
    "w3": (_GATE_UP, True),
    "w2": (_DOWN, False),
    "gate_linear": (_GRANITE_GATE_UP, False),
    "up_linear": (_GRANITE_GATE_UP, True),
    "output_linear": (_GRANITE_DOWN, False),
}
_RENAMED = (".block_sparse_moe.", ".mlp.")  # Mixtral's, in the form with stacked experts
# What stands behind the name of a tensor of experts in MXFP4: numbers [experts, rows, groups, 16],
# two of a group's 32 in a byte, and exponents [experts, rows, groups].
MXFP4_NUMBERS, MXFP4_SCALES, MXFP4_GROUP = "_blocks", "_scales", 32


class StackedPiece(NamedTuple):
    """Where a weight lies in a stored tensor."""

    stored: str
    shape: list[int]  # of the whole tensor
    expert: int | None  # index along its first dimension; None: the weight is the whole tensor
    rows: slice = slice(None)  # within the expert
    is_second: bool = False  # of gate and up
    is_transposed: bool = False  # an expert's rows are the last dimension


def stacked_pieces(
    shapes: Mapping[str, list[int]], num_experts: int = 0
) -> dict[str, StackedPiece]:
    """Weight -> its piece of a stored tensor, for the names of `shapes` that have another form.
    num_experts: of a layer, where `shapes` may lack the last ones.

    Experts with biases are those of gpt-oss: its stored tensors have the columns of an expert
    before its rows, which are of gate and up in turn.
    """
    found = {name: match for name in shapes if (match := _EXPERT.fullmatch(name))}
    counts: dict[str, int] = {}
    for match in found.values():
        counts[match[1]] = max(counts.get(match[1], num_experts), int(match[2]) + 1)
    pieces: dict[str, StackedPiece] = {}
    for name, match in found.items():
        stack, is_second = _STACKS[match[3]]
        rows, *columns = shapes[name]
        count, stored_rows = counts[match[1]], 2 * rows if stack in _PAIRS else rows
        stored = f"{match[1]}.{stack}"
        if stack in (_GATE_UP, _DOWN):
            stored = stored.replace(*_RENAMED)
        if match[4] == "bias":
            stored += "_bias"
        whole = [count, stored_rows, *columns]
        begin = rows if is_second else 0
        place = slice(begin, begin + rows)
        if has_biases := f"{name.removesuffix(match[4])}bias" in shapes:
            whole = [count, *columns, stored_rows]
            place = slice(int(is_second), stored_rows, stored_rows // rows)
        pieces[name] = StackedPiece(stored, whole, int(match[2]), place, is_second, has_biases)
    has_both = any(_RENAMED[0] in name for name in shapes)
    for name, shape in shapes.items():
        if name not in found and _RENAMED[0] in name:
            pieces[name] = StackedPiece(name.replace(*_RENAMED), shape, None)
        elif has_both and _RENAMED[1] in name:  # transformers saves Kimi Linear's MLPs in this way
            pieces[name] = StackedPiece(name.replace(_RENAMED[1], _RENAMED[0]), shape, None)
    return pieces
