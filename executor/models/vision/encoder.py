"""An encoder of images: the implementation of model.ImageEncoder.

Must not know: families of models, files, requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....ipc.models.vision_tower import Tower
from ....kernels.ops import make_metadata
from ...model import ImageEncoder
from ..layers import LayerFactory, Weights
from .places import Grid, angles_of, make_grid, patches_of, positions_of
from .tower import Places, VisionTower


class VisionEncoder(ImageEncoder):
    """Encodes images one after another, so that none changes another's bits."""

    def __init__(self, make: LayerFactory, tower: Tower):
        self.config, self.dtype, self.device = tower, make.dtype, make.device
        self.tower = VisionTower(make, tower)
        self.width = sum(one.dense[-1].out_features for one in tower.projectors)
        # of each value of a channel: [256, 3]
        values = torch.arange(256.0)[:, None] / 255
        values = (values - torch.tensor(tower.mean)) / torch.tensor(tower.std)
        self._values = values.to(self.dtype)

    @torch.inference_mode()
    def encode(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ImageEncoder."""
        rows = [self._encode(pixels) for pixels in images]
        if not rows:
            return torch.empty(0, self.width, dtype=self.dtype, device=self.device)
        return torch.cat(rows)

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        height, width, unit = *pixels.shape[:2], self.config.unit
        if not height or not width or height % unit or width % unit:
            raise ValueError(
                f"the sides of an image must be multiples of {unit}, got {width} x {height}"
            )
        size, merge = self.config.patch_size, self.config.merge
        grid = make_grid(height // size, width // size, merge)
        patches, places = self._patches(pixels, grid), self._places(grid)
        results = self.tower(patches, places)
        num_rows = len(grid.order) // (merge * merge)
        return torch.cat(
            [one.finish(x, num_rows) for one, x in zip(self.tower.projectors, results)], 1
        )

    def _patches(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[P, numbers of a patch] of the model's dtype, normalised"""
        values = patches_of(pixels.cpu(), grid).long()
        channels = torch.arange(3)
        numbers = self._values[values, channels].flatten(1)
        return torch.cat([numbers] * self.config.frames, 1).to(self.device)

    def _places(self, grid: Grid) -> Places:
        count, attention = len(grid.order), self.config.layer.attention
        added = None
        if self.tower.table is not None:
            grid_there = grid._replace(order=grid.order.to(self.device))
            added = positions_of(self.config.positions, self.tower.table, grid_there)
            added = added.to(self.dtype)
        angles = []
        if attention.rope:
            sizes = attention.rope, attention.rope_theta, attention.head_dim
            angles = [table.to(self.device) for table in angles_of(*sizes, grid)]
        lengths = torch.tensor([count], dtype=torch.int32)
        nothing = torch.zeros(count, dtype=torch.int64)
        metadata = make_metadata(
            torch.tensor([0, count], dtype=torch.int32).to(self.device),
            lengths.to(self.device),
            [torch.zeros(1, 1, dtype=torch.int32)],
            [nothing],
            0,
            [count],
            [count],
        )
        return Places(added, angles, torch.arange(count, device=self.device), metadata)

    def weights(self) -> Weights:
        """See Model.weights."""
        yield from self.tower.weights()
