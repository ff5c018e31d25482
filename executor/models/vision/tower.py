"""The layers of a vision tower and its projectors.

Must not know: families of models, files, where patches come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ....ipc.models import vision_tower as config
from ....kernels.ops import AttentionMetadata
from ...weights.table import Rearranged, Weight
from ..encoder import LayerNorm
from ..layers import LayerFactory, RMSNorm, Weights
from ..linear import Linear

Norm = LayerNorm | RMSNorm


class Places(NamedTuple):
    """Where the patches of an image are."""

    added: torch.Tensor | None  # [P, hidden_size]
    angles: Sequence[torch.Tensor]  # see angles_of
    positions: torch.Tensor  # [P] i64: the row of `angles` of each patch
    metadata: AttentionMetadata  # of one text: the image


def make_norm(make: LayerFactory, norm: config.Norm, index: int = 0) -> Norm:
    name = norm.name.format(index)
    if norm.kind == config.LAYER:
        return LayerNorm(make, name, norm.size, norm.eps)
    if not name:
        ones = torch.ones(norm.size, dtype=torch.float32, device=make.device)
        return RMSNorm(name, ones, norm.eps, make.ops)
    weight = make.parameter(norm.size, dtype=torch.float32 if norm.is_fp32 else None)
    return RMSNorm(name, Weight(weight, offset=norm.offset), norm.eps, make.ops)


def make_dense(make: LayerFactory, dense: config.Dense, index: int = 0) -> Linear:
    """Makes a linear layer. One whose weight files have in another order keeps the model's dtype in
    every quantization.
    """
    name, sizes = dense.name.format(index), (dense.in_features, dense.out_features)
    if dense.stored is None:
        return make.linear(sizes[0], {name: sizes[1]}, dense.has_bias)
    stored = Rearranged(dense.stored.shape, dense.stored.view, dense.stored.dims)
    return make.plain_linear(name, *sizes, dense.has_bias, stored)


class Merged:
    """Linear layers of one input as one."""

    def __init__(self, make: LayerFactory, parts: Sequence[config.Dense], index: int):
        shards = {part.name.format(index): part.out_features for part in parts}
        self.linear = make.linear(parts[0].in_features, shards, parts[0].has_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[P, in_features] -> [P, sum of out_features]"""
        return self.linear(x)

    def weights(self) -> Weights:
        yield from self.linear.weights("")


class Attention:
    def __init__(self, make: LayerFactory, attention: config.Attention, index: int):
        self.ops, self.config = make.ops, attention
        self.qkv = Merged(make, attention.qkv, index)
        self.out = Merged(make, [attention.out], index)

    def __call__(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """[P, hidden_size] -> [P, hidden_size]"""
        heads, head_dim = self.config.heads, self.config.head_dim
        query, key, value = self.qkv(x).view(len(x), 3, heads, head_dim).unbind(1)
        first = 0
        for angles in places.angles:
            part = slice(first, first + angles.shape[1])
            rotated = query[:, :, part], key[:, :, part]
            self.ops.rotary_embedding(places.positions, *rotated, angles)
            first = part.stop
        attended = self.ops.encoder_attention(query, key, value, places.metadata, self.config.scale)
        return self.out(attended.view(len(x), heads * head_dim))

    def weights(self) -> Weights:
        yield from self.qkv.weights()
        yield from self.out.weights()


class MLP:
    def __init__(self, make: LayerFactory, layer: config.TowerLayer, index: int):
        self.up, self.down = Merged(make, layer.up, index), Merged(make, [layer.down], index)
        self.activate = getattr(make.ops, layer.activation + "_and_mul" * (len(layer.up) > 1))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[P, hidden_size] -> [P, hidden_size]"""
        return self.down(self.activate(self.up(x)))

    def weights(self) -> Weights:
        yield from self.up.weights()
        yield from self.down.weights()


class Layer:
    def __init__(self, make: LayerFactory, layer: config.TowerLayer, index: int):
        self.ops = make.ops
        self.attention, self.mlp = (
            Attention(make, layer.attention, index),
            MLP(make, layer, index),
        )
        self.attention_norm = make_norm(make, layer.attention_norm, index)
        self.mlp_norm = make_norm(make, layer.mlp_norm, index)

    def __call__(self, residual: torch.Tensor, places: Places) -> None:
        """In place, residual [P, hidden_size]."""
        self.ops.add(self.attention(self.attention_norm(residual), places), residual)
        self.ops.add(self.mlp(self.mlp_norm(residual)), residual)

    def weights(self) -> Weights:
        for norm in (self.attention_norm, self.mlp_norm):
            yield from norm.weights("")
        yield from self.attention.weights()
        yield from self.mlp.weights()


class Projector:
    """Makes rows of the text model's width.

    What it does with each patch and each joined square belongs to the program of the tower. A mean
    of patches and what follows do not: there are few rows left.
    """

    def __init__(self, make: LayerFactory, projector: config.Projector, merge: int):
        self.config, self.ops, self.square = projector, make.ops, merge * merge
        self.before = make_norm(make, projector.before) if projector.before is not None else None
        self.after = make_norm(make, projector.after) if projector.after is not None else None
        self.dense = [make_dense(make, one) for one in projector.dense]

    def project_patches(self, x: torch.Tensor) -> torch.Tensor:
        """[P, hidden_size] -> what `finish` takes"""
        if self.before is not None:
            x = self.before(x)
        if self.config.pooling == config.MEAN:
            return x
        # a class token comes after the patches, and is left out
        count = len(x) // self.square
        joined = x[: count * self.square].view(count, self.square * x.shape[1])
        return self._project(joined)

    def finish(self, x: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The result of project_patches for an image of `num_rows` rows -> [num_rows, width]"""
        if self.config.pooling != config.MEAN:
            return x[:num_rows]
        squares = x[: num_rows * self.square].view(num_rows, self.square, -1).float()
        total = squares[:, 0].clone()
        for i in range(1, self.square):  # in an order that no number of threads changes
            total += squares[:, i]
        return self._project((total / self.square).to(x.dtype))

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        if self.after is not None:
            x = self.after(x)
        for dense, made in zip(self.config.dense, self.dense):
            x = made(x)
            if dense.activation:
                x = getattr(self.ops, dense.activation)(x)
        return x

    def weights(self) -> Weights:
        for part in (self.before, self.after, *self.dense):
            if part is not None:
                yield from part.weights("")


class VisionTower:
    """The model of an image: from patches to what the projectors' `finish` takes."""

    def __init__(self, make: LayerFactory, tower: config.Tower):
        self.config, self.ops = tower, make.ops
        self.patch = make_dense(make, tower.patch)
        self.table = None
        if tower.positions:
            self.table = make.parameter(*tower.position_shape)
        self.first_norm = make_norm(make, tower.first_norm) if tower.first_norm else None
        self.layers = [Layer(make, tower.layer, index) for index in range(tower.num_layers)]
        self.final_norm = make_norm(make, tower.final_norm) if tower.final_norm else None
        self.projectors = [Projector(make, one, tower.merge) for one in tower.projectors]

    def __call__(self, patches: torch.Tensor, places: Places) -> list[torch.Tensor]:
        """patches [P, numbers of a patch] -> for each projector what project_patches returns"""
        x = self.patch(patches)
        if places.added is not None:
            self.ops.add(places.added, x)
        if self.first_norm is not None:
            x = self.first_norm(x)
        results: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            layer(x, places)
            self._project(index, x, results)
        self._project(None, x if self.final_norm is None else self.final_norm(x), results)
        return [results[i] for i in range(len(self.projectors))]

    def _project(self, layer: int | None, x: torch.Tensor, to: dict[int, torch.Tensor]) -> None:
        """Puts the results of the projectors that read after a layer into `to`, by their index."""
        for i, projector in enumerate(self.projectors):
            if projector.config.layer == layer:
                to[i] = projector.project_patches(x)

    def weights(self) -> Weights:
        """The weight-name table; see Model.weights."""
        for part in (self.patch, self.first_norm, self.final_norm):
            if part is not None:
                yield from part.weights("")
        if self.table is not None:
            yield self.config.position_name, self.table
        for layer in self.layers:
            yield from layer.weights()
        for projector in self.projectors:
            yield from projector.weights()
