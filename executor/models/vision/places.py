"""The patches of an image, and what tells a tower's layers where each of them is.

Must not know: layers, weights' names, requests.

Patches are ordered by the squares that a row of the encoder's result stands for, and by rows in a
square. So the patches of a square are neighbours, and joining them is a view. The squares are in
reading order, or by windows in it. Attention in both directions does not depend on the order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....ipc.models.vision_tower import (
    ALIGNED,
    ALTERNATING,
    AXES,
    BUCKETS,
    HALVES_OF_HEADS,
    PAIRS,
    RESIZED,
    TABLE,
)
from ...device import sent


class Grid(NamedTuple):
    """An image's patches. `order` may be on the encoder's device; what follows from it is there
    too.
    """

    rows: int
    columns: int
    order: torch.Tensor  # [rows * columns] i64: the place in reading order of each patch
    # [squares] i64: the place in reading order of each square; None: squares are in that order
    squares: torch.Tensor | None
    lengths: list[int]  # patches of each window

    @property
    def row(self) -> torch.Tensor:
        """[rows * columns] i64: the row of each patch."""
        return self.order // self.columns

    @property
    def column(self) -> torch.Tensor:
        """[rows * columns] i64: the column of each patch."""
        return self.order % self.columns


def make_grid(rows: int, columns: int, merge: int, window: int = 0) -> Grid:
    """The grid of an image with this many rows and columns of patches, multiples of `merge`, which
    is the side of a square. With windows of `window` x `window` squares (those at the right and at
    the bottom may be smaller), squares are in the order of windows.
    """
    order = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    cells = order.transpose(1, 2).reshape(-1, merge * merge)  # [squares, patches]
    if not window:
        return Grid(rows, columns, cells.flatten(), None, [len(order.flatten())])
    across = columns // merge
    square = torch.arange(len(cells))
    windows = square // across // window * -(-across // window) + square % across // window
    squares = windows.argsort(stable=True)
    lengths = [count * merge * merge for count in windows.bincount().tolist()]
    return Grid(rows, columns, cells[squares].flatten(), squares, lengths)


def patches_of(pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
    """pixels u8 [height, width, 3] -> u8 [patches, height * width of a patch, 3]"""
    height, width = pixels.shape[0] // grid.rows, pixels.shape[1] // grid.columns
    cells = pixels.view(grid.rows, height, grid.columns, width, 3).transpose(1, 2)
    return cells.reshape(len(grid.order), height * width, 3)[grid.order]


def positions_of(kind: str, table: torch.Tensor, grid: Grid) -> torch.Tensor:
    """What is added to each patch, [patches, hidden_size] fp32. `kind` and `table` are those of
    Tower's positions.

    Raises ValueError for a grid that does not fit a table of another size.
    """
    if kind == PAIRS:
        kind, table = AXES, table.transpose(0, 1)
    if kind == AXES:
        if max(grid.rows, grid.columns) > table.shape[1]:
            raise ValueError(
                f"an image has at most {table.shape[1]} patches on a side, got {grid.rows} x "
                f"{grid.columns}"
            )
        return table[0, grid.column].float() + table[1, grid.row].float()
    side = round(len(table) ** 0.5)
    if kind == TABLE:
        if (grid.rows, grid.columns) != (side, side):
            raise ValueError(
                f"an image has {side} x {side} patches, got {grid.rows} x {grid.columns}"
            )
        return table[grid.order].float()
    if kind == BUCKETS:
        row, column = (sent(_buckets(count, side), at.device)[at] for count, at in _axes(grid))
        return table[row * side + column].float()
    weights = {ALIGNED: _aligned_weights, RESIZED: _resizing_weights}[kind]
    by_row, by_column = weights(grid.rows, side), weights(grid.columns, side)
    resized = _weigh(by_row, table.float().view(side, -1)).view(grid.rows, side, -1)
    resized = _weigh(by_column, resized.transpose(0, 1).reshape(side, -1))
    return resized.view(grid.columns, grid.rows, -1)[grid.column, grid.row]


def _axes(grid: Grid) -> tuple[tuple[int, torch.Tensor], tuple[int, torch.Tensor]]:
    return (grid.rows, grid.row), (grid.columns, grid.column)


def _buckets(count: int, side: int) -> torch.Tensor:
    """[count] i64: of `side` equal parts of the image's side, the one in which each of `count`
    patches begins. In fp32, as in transformers, which decides where a patch begins between two.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    begins = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(float(count)))
    return torch.bucketize(begins.clamp(max=1.0 - 1e-6), boundaries, right=True)


def _aligned_weights(count: int, side: int) -> torch.Tensor:
    """[count, side] fp32: how much of each of `side` points is in each of `count`. The first and
    the last points are the same.
    """
    at = torch.linspace(0, side - 1, count)
    return (1 - (torch.arange(side) - at[:, None]).abs()).clamp(min=0)


def _resizing_weights(count: int, side: int) -> torch.Tensor:
    """[count, side] fp32: the same for points in the middle of equal parts. Where there are fewer
    than before, each is a weighted mean of all that it replaces.
    """
    scale = side / count
    centre = (torch.arange(count, dtype=torch.float32) + 0.5) * scale - 0.5
    apart = (torch.arange(side) - centre[:, None]).abs() / max(scale, 1.0)
    weights = (1 - apart).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def _weigh(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """weights [count, side], on the host, times rows [side, N] -> [count, N]. Each sum is in
    ascending order: it has few terms, and its bits do not depend on the number of threads.
    """
    is_used = weights > 0
    most = int(is_used.sum(1).max())
    at = is_used.int().argmax(1, keepdim=True) + torch.arange(most)  # [count, most]
    is_inside, at = at < len(rows), at.clamp(max=len(rows) - 1)
    weights = sent(weights.gather(1, at) * is_inside, rows.device)
    at = sent(at, rows.device)
    total = torch.zeros(len(weights), rows.shape[1], device=rows.device)
    for i in range(most):
        total.addcmul_(weights[:, i : i + 1], rows[at[:, i]])
    return total


def angles_of(kind: str, theta: float, head_dim: int, grid: Grid) -> list[torch.Tensor]:
    """Cosines and sines for the parts of a head that rotate by themselves, [patches, size of the
    part] fp32 each, as in rotary_embedding. `kind` is that of Attention's rope.
    """
    row, column = grid.row.float()[:, None], grid.column.float()[:, None]
    if kind == ALTERNATING:
        frequencies = theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
        frequencies = sent(frequencies, row.device)
        angles = [torch.cat((row * frequencies[0::2], column * frequencies[1::2]), 1)]
    else:
        half = head_dim // 2
        frequencies = sent(theta ** -(torch.arange(0, half, 2).float() / half), row.device)
        angles = [row * frequencies, column * frequencies]
        angles = angles[::-1] if kind == HALVES_OF_HEADS else [torch.cat(angles, 1)]
    return [torch.cat((angle.cos(), angle.sin()), 1) for angle in angles]
