"""An encoder of images: the implementation of model.ImageEncoder.

Must not know: families of models, files, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....kernels.ops import AttentionMetadata, make_metadata
from ...device import sent
from ...model import ImageEncoder
from ..layers import LayerFactory, Weights
from .places import Grid, angles_of, make_grid, patches_of, positions_of
from .tower import Places, VisionTower

Run = Callable[[torch.Tensor, Places], list[torch.Tensor]]


class VisionEncoder(ImageEncoder):
    """Encodes images one after another, so that none changes another's bits. On a GPU an image is
    one sequence of launches, and nobody waits for it.
    """

    def __init__(self, model: VisionTower, run: Run, make: LayerFactory):
        """run: calls the model."""
        self.config, self.dtype, self.device = model.config, make.dtype, make.device
        self.tower, self._run = model, run
        tower = model.config
        self.width = sum(one.dense[-1].out_features for one in tower.projectors)
        # of each value of a channel: [256, 3]
        values = torch.arange(256.0)[:, None] / 255
        values = (values - torch.tensor(tower.mean)) / torch.tensor(tower.std)
        self._values = values.to(self.dtype).to(self.device)
        self._channels = torch.arange(3, device=self.device)

    @torch.inference_mode()
    def encode(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ImageEncoder."""
        rows = [self._encode(pixels) for pixels in images]
        if not rows:
            return torch.empty(0, self.width, dtype=self.dtype, device=self.device)
        return torch.cat(rows)

    def encode_largest(self, num_rows: int) -> None:
        """See ImageEncoder."""
        side = self.config.largest_side(num_rows)
        self.encode([torch.zeros(side, side, 3, dtype=torch.uint8)])

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        height, width, unit = *pixels.shape[:2], self.config.unit
        if not height or not width or height % unit or width % unit:
            raise ValueError(
                f"the sides of an image must be multiples of {unit}, got {width} x {height}"
            )
        size, merge, layer = self.config.patch_size, self.config.merge, self.config.layer
        window = 0 if layer is None else layer.attention.window
        grid = make_grid(height // size, width // size, merge, window)
        grid = grid._replace(order=sent(grid.order, self.device))
        results = self._run(self._patches(pixels, grid), self._places(grid))
        num_rows = len(grid.order) // (merge * merge)
        rows = torch.cat(
            [one.finish(x, num_rows) for one, x in zip(self.tower.projectors, results)], 1
        )
        if grid.squares is None:
            return rows
        return rows[sent(grid.squares.argsort(), self.device)]

    def _patches(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[P, numbers of a patch] of the model's dtype, normalised"""
        values = patches_of(sent(pixels.cpu(), self.device), grid).long()
        numbers = self._values[values, self._channels].flatten(1)
        numbers = torch.cat([numbers] * self.config.frames, 1)
        if self.tower.class_token is not None:
            numbers = torch.cat((numbers, torch.zeros_like(numbers[:1])))
        return numbers

    def _places(self, grid: Grid) -> Places:
        layer = self.config.layer
        angles = []
        if layer is not None and layer.attention.rope:
            attention = layer.attention
            sizes = attention.rope, attention.rope_theta, attention.head_dim
            angles = angles_of(*sizes, grid)
        count = len(grid.order) + (self.tower.class_token is not None)
        whole = _texts([count], self.device)
        windows = whole if grid.squares is None else _texts(grid.lengths, self.device)
        positions = torch.arange(count, device=self.device)
        return Places(self._added(grid), angles, positions, whole, windows)

    def _added(self, grid: Grid) -> torch.Tensor | None:
        """See Places."""
        table, kind, token = self.tower.table, self.config.positions, self.tower.class_token
        if table is None:
            return None
        if token is None:
            return positions_of(kind, table, grid).to(self.dtype)
        added = positions_of(kind, table[0, 1:], grid)
        first = token[0].float() + table[0, :1].float()
        if self.tower.patch.bias is not None:  # of the patch projection, whose input is 0 here
            first -= self.tower.patch.bias.float()
        return torch.cat((added, first)).to(self.dtype)

    def weights(self) -> Weights:
        """See Model.weights."""
        yield from self.tower.weights()


def _texts(lengths: list[int], device: torch.device) -> AttentionMetadata:
    """The metadata of texts of these lengths, one after another, for encoder_attention."""
    counts = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    tables = torch.zeros(len(lengths), 1, dtype=torch.int32)
    slots = torch.zeros(sum(lengths), dtype=torch.int64)
    starts, counts = sent(starts, device), sent(counts, device)
    return make_metadata(starts, counts, [tables], [slots], 0, lengths, lengths)
