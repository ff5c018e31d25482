"""The stack that text encoders share: embeddings, then layers of attention in both directions and
an MLP, with layer norms after or before them.

Must not know: which architectures there are, files, requests. ipc/models/encoders.py has the names
of the tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...ipc.models.encoder_config import EncoderConfig
from ...ipc.models.encoders import EncoderArchitecture
from ...kernels.ops import AttentionMetadata
from ..model import TextEncoder
from ..pooling.heads import make_head
from ..weights.table import Weight
from .layers import LayerFactory, Rope, Weights

MAX_DISTANCE = 128  # of two tokens; those farther apart have the last bucket's bias


class LayerNorm:
    def __init__(self, make: LayerFactory, name: str, size: int, eps: float, has_bias: bool = True):
        self.name, self.eps, self.ops = name, eps, make.ops
        self.weight = make.parameter(size)
        self.bias = make.parameter(size) if has_bias else None

    @classmethod
    def of(cls, make: LayerFactory, name: str, config: EncoderConfig) -> LayerNorm:
        """A norm of a text encoder."""
        return cls(make, name, config.hidden_size, config.layer_norm_eps, config.norm_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size] -> [T, size]"""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """In place: residual += x, then x = norm(residual); both [T, size]."""
        self.ops.fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def weights(self, prefix: str) -> Weights:
        yield f"{prefix}{self.name}.weight", self.weight
        if self.bias is not None:
            yield f"{prefix}{self.name}.bias", self.bias


class RelativeBias:
    """The bias that attention adds to a logit. It depends on the bucket of the distance of key and
    query (Raffel et al. 2020; MPNet). All layers have the same bias.
    """

    saved_bytes = 0

    def __init__(self, make: LayerFactory, name: str, config: EncoderConfig):
        self.name = name
        self.table = make.parameter(
            config.relative_buckets, config.num_attention_heads, dtype=torch.float32
        )
        # [heads, 2 * MAX_DISTANCE + 1], for the distances from -MAX_DISTANCE on
        self.by_distance = torch.empty(
            config.num_attention_heads, 2 * MAX_DISTANCE + 1, device=make.device
        )

    def fill(self, tensor: torch.Tensor, values: Any) -> None:
        self.table.copy_(values)
        distances = torch.arange(-MAX_DISTANCE, MAX_DISTANCE + 1)
        buckets = relative_buckets(distances, len(self.table)).to(self.table.device)
        self.by_distance.copy_(self.table[buckets].T)

    def weights(self, prefix: str) -> Weights:
        yield f"{prefix}{self.name}.weight", Weight(self.table, self)


def relative_buckets(distances: torch.Tensor, count: int) -> torch.Tensor:
    """The bucket of each distance, key minus query. Each direction has half of the buckets. Of
    these, half hold a single distance each, and half are on a logarithmic scale up to MAX_DISTANCE.
    """
    half = count // 2
    exact, far = half // 2, distances.abs()
    log = torch.log(far.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact)
    wide = (exact + (log * (half - exact)).long()).clamp(max=half - 1)
    return (distances > 0).long() * half + torch.where(far < exact, far, wide)


class EncoderLayer:
    """Attention and MLP. `norms` come after them or before them; if before, the first may be
    missing.
    """

    def __init__(
        self,
        make: LayerFactory,
        config: EncoderConfig,
        row: EncoderArchitecture,
        index: int,
        rope: Rope | None,
        bias: RelativeBias | None,
    ):
        names, hidden, inner = row.names, config.hidden_size, config.intermediate_size
        self.ops, self.rope, self.bias = make.ops, rope, bias
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.scale, self.hidden_size = config.head_dim**-0.5, hidden
        self.window = config.windows[index] if config.windows else 0
        qkv = {name: 3 * hidden // len(names.qkv) for name in names.qkv}
        self.qkv = make.linear(hidden, qkv, config.attention_bias)
        self.out = make.row_linear(names.out, hidden, hidden, config.attention_bias)
        up = {name: (1 + row.is_gated) * inner // len(names.up) for name in names.up}
        self.up = make.linear(hidden, up, config.mlp_bias)
        self.down = make.row_linear(names.down, inner, hidden, config.mlp_bias)
        self.activate = getattr(make.ops, config.activation + "_and_mul" * row.is_gated)
        has_norm = index > 0 or not row.is_pre_norm
        self.attention_norm = LayerNorm.of(make, names.attention_norm, config) if has_norm else None
        self.mlp_norm = LayerNorm.of(make, names.mlp_norm, config)

    def attend(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        query, key, value = self.qkv(x).view(len(x), 3, self.heads, self.head_dim).unbind(1)
        if self.rope is not None:
            self.ops.rotary_embedding(positions, query, key, self.rope.key)
        bias = None if self.bias is None else self.bias.by_distance
        attended = self.ops.encoder_attention(
            query, key, value, metadata, self.scale, self.window, bias
        )
        return self.out(attended.view(len(x), self.hidden_size))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        return self.down(self.activate(self.up(x)))

    def weights(self, prefix: str) -> Weights:
        for part in (self.qkv, self.out, self.up, self.down, self.attention_norm, self.mlp_norm):
            if part is not None:
                yield from part.weights(prefix)


class Encoder(TextEncoder):
    """A text encoder. It has hidden states and no logits."""

    def __init__(
        self,
        row: EncoderArchitecture,
        config: EncoderConfig,
        make: LayerFactory,
        max_model_len: int,
    ):
        self.config, self.names = config, row.names
        self.ops = make.ops
        names, hidden = row.names, config.hidden_size
        self.words = make.embedding(names.words, config.vocab_size, hidden)
        self.positions = self.types = None
        if names.positions:
            rows = config.max_position_embeddings + config.position_offset
            self.positions = make.parameter(rows, hidden)
        if config.type_vocab_size:
            self.types = make.embedding(names.types, config.type_vocab_size, hidden)
        self.num_token_types = 0
        if self.types is not None:
            self.num_token_types = 1 + config.has_pair_types
        self.embedding_norm = LayerNorm.of(make, names.embedding_norm, config)
        self.bias = RelativeBias(make, names.relative_bias, config) if names.relative_bias else None
        num_layers = config.num_hidden_layers
        ropes = make.ropes(config, max_model_len) if config.ropes else [None] * num_layers
        self.layers = [
            EncoderLayer(make, config, row, index, ropes[index], self.bias)
            for index in range(num_layers)
        ]
        self.final_norm = LayerNorm.of(make, names.final_norm, config) if names.final_norm else None
        self.head = make_head(make, config.head)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids and token_types [T] i32, positions [T] i64 -> hidden states [T, hidden_size]"""
        x = self._embed(token_ids, positions, token_types)
        if self.final_norm is None:
            for layer in self.layers:
                x = self._after(x, layer.attend(x, positions, metadata), layer.attention_norm)
                x = self._after(x, layer.mlp(x), layer.mlp_norm)
            return x
        residual = x
        for index, layer in enumerate(self.layers):
            if layer.attention_norm is None:
                x = layer.attend(residual, positions, metadata)
            else:
                x = layer.attend(x, positions, metadata)
            layer.mlp_norm.add(x, residual)
            x = layer.mlp(x)
            is_last = index + 1 == len(self.layers)
            norm = self.final_norm if is_last else self.layers[index + 1].attention_norm
            assert norm is not None
            norm.add(x, residual)
        return x

    @staticmethod
    def _after(residual: torch.Tensor, x: torch.Tensor, norm: LayerNorm | None) -> torch.Tensor:
        """norm(residual + x), in the memory of x"""
        assert norm is not None
        norm.add(x, residual)
        return x

    def _embed(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
    ) -> torch.Tensor:
        x = self.words(token_ids)
        if self.positions is not None:
            rows = self.positions[self.config.position_offset :]
            self.ops.add(self.ops.embedding(positions, rows), x)
        if self.types is None:
            return self.embedding_norm(x)
        assert token_types is not None
        types = self.types(token_types)
        self.embedding_norm.add(types, x)
        return types

    def weights(self) -> Weights:
        """The weight-name table; see decoder.py."""
        names, base = self.names, self.names.base
        yield from self.words.weights(base)
        if self.positions is not None:
            yield f"{base}{names.positions}.weight", self.positions
        if self.types is not None:
            yield from self.types.weights(base)
        for part in (self.embedding_norm, self.bias, self.final_norm):
            if part is not None:
                yield from part.weights(base)
        for index, layer in enumerate(self.layers):
            yield from layer.weights(base + names.layer.format(index))
        yield from self.head.weights()
