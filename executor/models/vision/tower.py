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


class Unweighted(RMSNorm):
    """An RMS norm whose weight is 1, and stands in no checkpoint."""

    def __init__(self, norm: config.Norm, make: LayerFactory):
        ones = torch.ones(norm.size, dtype=torch.float32, device=make.device)
        super().__init__("", ones, norm.eps, make.ops)

    def weights(self, prefix: str) -> Weights:
        yield from ()


Norm = LayerNorm | RMSNorm


class Places(NamedTuple):
    """Where the patches of an image are."""

    added: torch.Tensor | None  # [P, hidden_size]
    angles: Sequence[torch.Tensor]  # see angles_of
    positions: torch.Tensor  # [P] i64: the row of `angles` of each patch
    metadata: AttentionMetadata  # of one text: the image
    windows: AttentionMetadata  # of a text for each window, or the same where there are none


def make_norm(make: LayerFactory, norm: config.Norm, index: int = 0) -> Norm:
    name = norm.name.format(index)
    if norm.kind == config.LAYER:
        return LayerNorm(make, name, norm.size, norm.eps)
    if not name:
        return Unweighted(norm, make)
    weight = make.parameter(norm.size, dtype=torch.float32 if norm.is_fp32 else None)
    return RMSNorm(name, Weight(weight, offset=norm.offset), norm.eps, make.ops)


def make_dense(make: LayerFactory, dense: config.Dense, follows_quantization: bool) -> Linear:
    """Makes a linear layer. One whose weight files have in another order keeps the model's dtype in
    every quantization.
    """
    sizes = dense.in_features, dense.out_features
    if dense.stored is not None:
        stored = Rearranged(dense.stored.shape, dense.stored.view, dense.stored.dims)
        return make.plain_linear(dense.name, *sizes, dense.has_bias, stored)
    if not follows_quantization:
        return make.plain_linear(dense.name, *sizes, dense.has_bias)
    return make.linear(sizes[0], {dense.name: sizes[1]}, dense.has_bias)


class Merged:
    """Linear layers of one input, whose results are side by side."""

    def __init__(self, make: LayerFactory, parts: Sequence[config.Dense], index: int):
        shards = {part.name.format(index): part.out_features for part in parts}
        self.linear = make.linear(parts[0].in_features, shards, parts[0].has_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[P, in_features] -> [P, sum of out_features]"""
        return self.linear(x)

    def apart(self, x: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """[P, in_features] -> [P, size] of each of the sizes"""
        return self(x).split(sizes, 1)

    def weights(self) -> Weights:
        yield from self.linear.weights("")


class Clipped:
    """A linear layer whose input and output are bounded."""

    def __init__(self, make: LayerFactory, part: config.Dense, index: int):
        self.linear, self.clamp = Merged(make, [part], index), make.ops.clamp
        self.names = [name.format(index) for name in part.bounds]
        # the least and the largest input, and output
        self.bounds = make.parameter(2, 2, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[P, in_features] -> [P, out_features]"""
        return self.clamp(self.linear(self.clamp(x, self.bounds[0])), self.bounds[1])

    def weights(self) -> Weights:
        yield from self.linear.weights()
        yield from zip(self.names, self.bounds.flatten())


class SeparatelyClipped:
    """Several of them with one input, each with bounds of its own."""

    def __init__(self, make: LayerFactory, parts: Sequence[config.Dense], index: int):
        self.linears = [Clipped(make, part, index) for part in parts]

    def apart(self, x: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """See Merged."""
        return [linear(x) for linear in self.linears]

    def weights(self) -> Weights:
        for linear in self.linears:
            yield from linear.weights()


def make_one(make: LayerFactory, part: config.Dense, index: int) -> Merged | Clipped:
    return Clipped(make, part, index) if part.is_clipped else Merged(make, [part], index)


class Attention:
    def __init__(self, make: LayerFactory, attention: config.Attention, index: int):
        self.ops, self.config = make.ops, attention
        self.is_windowed = bool(attention.window) and index not in attention.whole_layers
        is_clipped = attention.out.is_clipped
        self.qkv = (SeparatelyClipped if is_clipped else Merged)(make, attention.qkv, index)
        self.out = make_one(make, attention.out, index)
        self.q_norm, self.k_norm, self.value_norm = (
            None if norm is None else make_norm(make, norm, index)
            for norm in (attention.q_norm, attention.k_norm, attention.value_norm)
        )

    def __call__(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """[P, hidden_size] -> [P, hidden_size]"""
        attention = self.config
        sizes = [n * attention.head_dim for n in (attention.heads, *[attention.kv_heads] * 2)]
        query, key, value = self.qkv.apart(x, sizes)
        query = self._heads(query, self.q_norm)
        key, value = self._heads(key, self.k_norm), self._heads(value, self.value_norm)
        first = 0
        for angles in places.angles:
            part = slice(first, first + angles.shape[1])
            rotated = query[:, :, part], key[:, :, part]
            self.ops.rotary_embedding(places.positions, *rotated, angles)
            first = part.stop
        texts = places.windows if self.is_windowed else places.metadata
        attended = self.ops.encoder_attention(query, key, value, texts, attention.scale)
        return self.out(attended.view(len(x), sizes[0]))

    def _heads(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """[P, heads * head_dim] -> [P, heads, head_dim], normed by head, or over all heads"""
        size = self.config.head_dim
        if norm is None:
            return x.view(len(x), -1, size)
        if len(norm.weight) == size:
            return norm(x.view(len(x), -1, size))
        return norm(x).view(len(x), -1, size)

    def weights(self) -> Weights:
        for part in (self.qkv, self.out):
            yield from part.weights()
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                yield from norm.weights("")


class MLP:
    def __init__(self, make: LayerFactory, layer: config.TowerLayer, index: int):
        self.up, self.down = Merged(make, layer.up, index), make_one(make, layer.down, index)
        self.activate = getattr(make.ops, layer.activation + "_and_mul" * (len(layer.up) > 1))

    def __call__(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """[P, hidden_size] -> [P, hidden_size]"""
        return self.down(self.activate(self.up(x)))

    def weights(self) -> Weights:
        for part in (self.up, self.down):
            yield from part.weights()


class ClippedMLP:
    """With a gate, whose layer has other bounds than the one beside it."""

    def __init__(self, make: LayerFactory, layer: config.TowerLayer, index: int):
        self.up = SeparatelyClipped(make, layer.up, index)
        self.down = Clipped(make, layer.down, index)
        self.activate, self.multiply = getattr(make.ops, layer.activation), make.ops.multiply
        self.sizes = [part.out_features for part in layer.up]

    def __call__(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """[P, hidden_size] -> [P, hidden_size]"""
        gate, up = self.up.apart(x, self.sizes)
        return self.down(self.multiply(up[:, None], self.activate(gate)[:, None], "none")[:, 0])

    def weights(self) -> Weights:
        for part in (self.up, self.down):
            yield from part.weights()


class Residual:
    """A block of a layer, whose result is added to its input."""

    def __init__(
        self,
        make: LayerFactory,
        block: Attention | MLP | ClippedMLP,
        before: config.Norm,
        after: config.Norm | None,
        factor: str,
        index: int,
    ):
        """factor: the name of a vector that the result is multiplied by, or ""."""
        self.ops, self.block, self.size = make.ops, block, before.size
        self.before = make_norm(make, before, index)
        self.after = None if after is None else make_norm(make, after, index)
        self.factor_name = factor.format(index)
        self.factor = make.parameter(before.size) if factor else None

    def __call__(self, x: torch.Tensor, places: Places) -> None:
        """In place, x [P, hidden_size]."""
        y = self.block(self.before(x), places)
        if self.after is not None:
            y = self.after(y)
        if self.factor is not None:
            shape = len(x), 1, self.size
            y = self.ops.multiply(y.view(shape), self.factor.expand(shape), "none").view(x.shape)
        self.ops.add(y, x)

    def weights(self) -> Weights:
        for norm in (self.before, self.after):
            if norm is not None:
                yield from norm.weights("")
        if self.factor is not None:
            yield self.factor_name, self.factor
        yield from self.block.weights()


def make_layer(make: LayerFactory, layer: config.TowerLayer, index: int) -> list[Residual]:
    attention = Attention(make, layer.attention, index)
    mlp = (ClippedMLP if layer.down.is_clipped else MLP)(make, layer, index)
    of_attention = layer.attention_norm, layer.attention_after, layer.attention_factor
    of_mlp = layer.mlp_norm, layer.mlp_after, layer.mlp_factor
    return [
        Residual(make, attention, *of_attention, index),
        Residual(make, mlp, *of_mlp, index),
    ]


class Projector:
    """Makes rows of the text model's width.

    What it does with each patch and each joined square belongs to the program of the tower. A mean
    of patches and what follows do not: there are few rows left.
    """

    def __init__(self, make: LayerFactory, projector: config.Projector, merge: int):
        self.config, self.ops, self.square = projector, make.ops, merge * merge
        self.before = make_norm(make, projector.before) if projector.before is not None else None
        self.after = make_norm(make, projector.after) if projector.after is not None else None
        self.dense = [make_dense(make, one, True) for one in projector.dense]
        self.shift = self.scale = None
        if projector.shift:
            self.shift, self.scale = (
                make.parameter(projector.dense[0].in_features, dtype=torch.float32)
                for _ in range(2)
            )

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
        mean = (total / self.square).to(x.dtype).float() * self.config.factor
        if self.shift is not None and self.scale is not None:
            mean = (mean - self.shift) * self.scale
        return self._project(mean.to(x.dtype))

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
        if self.shift is not None and self.scale is not None:
            yield self.config.shift, self.shift
            yield self.config.scale, self.scale


class VisionTower:
    """The model of an image: from patches to what the projectors' `finish` takes."""

    def __init__(self, make: LayerFactory, tower: config.Tower):
        self.config, self.ops = tower, make.ops
        self.patch = make_dense(make, tower.patch, False)
        self.table = make.parameter(*tower.position_shape) if tower.positions else None
        self.class_token = None
        if tower.class_token:
            self.class_token = make.parameter(1, 1, tower.hidden_size)
        self.pixel_norm, self.patch_norm, self.first_norm, self.final_norm = (
            None if norm is None else make_norm(make, norm)
            for norm in (tower.pixel_norm, tower.patch_norm, tower.first_norm, tower.final_norm)
        )
        self.layers: list[list[Residual]] = []
        if tower.layer is not None:
            self.layers = [make_layer(make, tower.layer, i) for i in range(tower.num_layers)]
        self.projectors = [Projector(make, one, tower.merge) for one in tower.projectors]

    def __call__(self, patches: torch.Tensor, places: Places) -> list[torch.Tensor]:
        """patches [P, numbers of a patch] -> for each projector what project_patches returns"""
        x = self.patch(patches if self.pixel_norm is None else self.pixel_norm(patches))
        if self.patch_norm is not None:
            x = self.patch_norm(x)
        if places.added is not None:
            self.ops.add(places.added, x)
        if self.first_norm is not None:
            x = self.first_norm(x)
        results: dict[int, torch.Tensor] = {}
        for index, blocks in enumerate(self.layers):
            for block in blocks:
                block(x, places)
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
        yield from self.patch.weights("")
        for norm in (self.pixel_norm, self.patch_norm, self.first_norm, self.final_norm):
            if norm is not None:
                yield from norm.weights("")
        if self.table is not None:
            yield self.config.position_name, self.table
        if self.class_token is not None:
            yield self.config.class_token, self.class_token
        for blocks in self.layers:
            for block in blocks:
                yield from block.weights()
        for projector in self.projectors:
            yield from projector.weights()
