"""The blocks of a decoder layer: attention over the paged cache, and a gated MLP.

Must not know: architectures, files, requests, how a layer with weights is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ipc.models.architectures import PLAIN_NAMES, TensorNames
from ...ipc.models.decoder_config import GATE_OF_ELEMENTS, GATE_OF_HEADS, DecoderConfig
from ...kernels.ops import AttentionMetadata, ImageRows
from .layers import LayerFactory, Linear, Rope, Weights

FUSED_PARTS = (
    "rms_norm",
    "rotary_embedding",
    "reshape_and_cache",
    "fused_qk_rope_reshape_and_cache",
)


class Attention:
    """Causal grouped-query attention over the paged cache, with rotary positions and optional q/k
    norms.
    """

    has_values = True  # beside the keys, in the cache

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        layer: int,
        ropes: list[Rope | None],
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
        qk_norm_whole: bool = False,
        is_merged: bool = False,
        has_sinks: bool = False,
        value_norm: bool = False,
        names: TensorNames = PLAIN_NAMES,
        is_interleaved: bool = False,
        norms_rotated: bool = False,
    ):
        """`layer` is the index in the stack, and `ropes` come from make.ropes. For the options see
        ipc/models/architectures.py.
        """
        own = config.layer(layer)
        # the numbers of heads that this rank has
        self.num_heads = make.share(config.num_attention_heads, "num_attention_heads")
        self.num_kv_heads = make.share(own.num_kv_heads, "num_key_value_heads")
        self.head_dim, self.gate = own.head_dim, config.attention_gate
        q_rows, kv_rows = (n * own.head_dim for n in (config.num_attention_heads, own.num_kv_heads))
        of_heads = {names.attention_gate: config.num_attention_heads}
        has_gates = self.gate == GATE_OF_HEADS
        self.gate_proj = make.linear(config.hidden_size, of_heads) if has_gates else None
        if is_merged:
            self.qkv_proj = self._merged_qkv(make, config, layer, qkv_bias)
        else:
            shards = _rows_of_qkv(config, layer)
            self.qkv_proj = make.linear(config.hidden_size, shards, qkv_bias, unit=self.head_dim)
        self.o_proj = make.row_linear(names.o_proj, q_rows, config.hidden_size, o_bias)
        self.o_norm = make.gathered_norm(names.o_norm, q_rows, config) if names.o_norm else None
        q_size, k_size = (q_rows, kv_rows) if qk_norm_whole else (self.head_dim, self.head_dim)
        norm = make.gathered_norm if qk_norm_whole else make.norm
        self.q_norm = norm(names.q_norm, q_size, config) if qk_norm else None
        self.k_norm = norm(names.k_norm, k_size, config) if qk_norm else None
        self.v_norm = make.unweighted_norm(self.head_dim, config) if value_norm else None
        self.sinks = make.head_parameter(config.num_attention_heads) if has_sinks else None
        self.rope = ropes[layer]
        self.scale, self.sliding_window = config.attention_scale, config.sliding_windows[layer]
        self.cap, self.ops, self._qk_norm_whole = config.attention_cap, make.ops, qk_norm_whole
        # [num_blocks, block_size, num_kv_heads, head_dim], set by bind_cache
        self.key_cache: torch.Tensor | None = None
        self.value_cache: torch.Tensor | None = None
        self.kv_cache_group = 0  # the group of its block table
        self._heads = (self.num_heads, *[self.num_kv_heads] * (1 + own.has_values))
        self._fused = self._can_fuse() and not (qk_norm_whole or is_interleaved or norms_rotated)
        self._norms_rotated, self._sees_later = norms_rotated, make.sees_later(self.sliding_window)
        name = "rotary_embedding_interleaved" if is_interleaved else "rotary_embedding"
        self._rotation = getattr(make.ops, name)
        self._norms = (
            (self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps)
            if self.q_norm is not None and self.k_norm is not None
            else (None, None, 0.0)
        )
        self._q_rows = self.num_heads * self.head_dim

    def _merged_qkv(
        self, make: LayerFactory, config: DecoderConfig, layer: int, has_bias: bool
    ) -> Linear:
        """The projection whose queries, keys and values are one tensor of the checkpoint."""
        of_keys = config.layer(layer).num_kv_heads
        heads = config.num_attention_heads, of_keys, of_keys
        sizes, orders = [count * self.head_dim for count in heads], {}
        if make.is_divided:
            parts = zip(torch.arange(sum(sizes)).split(sizes), heads)
            orders = {"qkv_proj": make.kept_rows(*parts)}
        return make.linear(config.hidden_size, {"qkv_proj": sum(sizes)}, has_bias, orders=orders)

    def _can_fuse(self) -> bool:
        """Whether one implementer provides the fused operation and its parts: a user's kernel for
        one part must not be bypassed. Queries and keys have the same table of angles.
        """
        if self.rope is None or self.rope.query is not self.rope.key:
            return False
        if self.rope.components is not None:
            return False
        return len({self.ops.chosen[op] for op in FUSED_PARTS}) == 1

    def bind_cache(self, key: torch.Tensor | None, value: torch.Tensor | None, group: int) -> None:
        """Makes these its part of the KV cache, with the block table of this group of layers. None
        takes the cache away.
        """
        self.key_cache, self.value_cache, self.kv_cache_group = key, value, group

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden_size], positions [T] i64 -> [T, hidden_size].

        Writes the keys and values of the T tokens to the cache.
        """
        gate = None if self.gate_proj is None else self.gate_proj(x)[:, :, None]
        return self.attend(self.qkv_proj(x), positions, metadata, gate)

    def attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends with the product `qkv` [T, (num_heads + 2 * num_kv_heads) * head_dim], which has
        as many columns more as there are gates of elements, and no values where these are the keys.
        gate [T, num_heads, 1]: of heads.
        """
        ops, num_tokens = self.ops, len(qkv)
        if self.gate == GATE_OF_ELEMENTS:
            gated, qkv = qkv.tensor_split([2 * self._q_rows], dim=1)
            gated = gated.view(num_tokens, self.num_heads, 2 * self.head_dim)
            query, gate = gated.split(self.head_dim, dim=2)
            key, *values = qkv.view(num_tokens, -1, self.head_dim).split(self._heads[1:], dim=1)
        else:
            query, key, *values = qkv.view(num_tokens, -1, self.head_dim).split(self._heads, dim=1)
        value = values[0] if values else key
        if self.v_norm is not None:
            value = self.v_norm(value)
        images = metadata.images
        if metadata.groups:
            metadata = metadata.groups[self.kv_cache_group]
        slots = metadata.slot_mapping
        if self._fused and self.rope is not None:
            ops.fused_qk_rope_reshape_and_cache(
                positions,
                query,
                key,
                value,
                self.rope.key,
                self.key_cache,
                self.value_cache,
                slots,
                *self._norms,
            )
        else:
            query, key = self._normed_and_rotated(positions, query, key, images)
            ops.reshape_and_cache(key, value, self.key_cache, self.value_cache, slots)
        attended = ops.paged_attention(
            query,
            self.key_cache,
            self.value_cache,
            metadata,
            self.scale,
            self.sliding_window,
            self.cap,
            self.sinks,
            **later_tokens(self._sees_later, images),
        )
        if gate is not None:
            attended = ops.multiply(attended, gate, "sigmoid")
        return self._projected(attended.view(num_tokens, self._q_rows))

    def _projected(self, attended: torch.Tensor) -> torch.Tensor:
        """[T, num_heads * head_dim] -> [T, hidden_size]"""
        return self.o_proj(attended if self.o_norm is None else self.o_norm(attended))

    def _normed_and_rotated(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        images: ImageRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query [T, heads, head_dim] and key [T, kv_heads, head_dim], of which both may change."""
        if self._norms_rotated:
            self._rotate(positions, query, key, images)
            return self._normed(query, key)
        query, key = self._normed(query, key)
        self._rotate(positions, query, key, images)
        return query, key

    def _normed(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """query [T, heads, head_dim] and key [T, kv_heads, head_dim], after their norms if any."""
        if self.q_norm is None or self.k_norm is None:
            return query, key
        if self._qk_norm_whole:
            normed = self.q_norm(query.flatten(1)), self.k_norm(key.flatten(1))
            return normed[0].view(query.shape), normed[1].view(key.shape)
        return self.q_norm(query), self.k_norm(key)

    def _rotate(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        images: ImageRows | None,
    ) -> None:
        """Rotates both in place; query and key have the shapes of _normed."""
        if self.rope is None:
            return
        rotate, (of_query, of_key, components) = self._rotation, self.rope
        if components is not None:
            assert images is not None  # of a model that reads images
            parts = positions, images.offsets, query, key, of_key, components
            self.ops.rotary_embedding_by_component(*parts)
        elif of_query is of_key:
            rotate(positions, query, key, of_key)
        else:  # they have tables of their own, so each rotates alone
            rotate(positions, query, key[:, :0], of_query)
            rotate(positions, query[:, :0], key, of_key)

    def weights(self, prefix: str) -> Weights:
        norms = self.q_norm, self.k_norm, self.o_norm
        for layer in (self.qkv_proj, self.o_proj, self.gate_proj, *norms):
            if layer is not None:
                yield from layer.weights(prefix)
        if self.sinks is not None:
            yield f"{prefix}sinks", self.sinks


def later_tokens(sees_later: bool, images: ImageRows | None) -> dict[str, torch.Tensor]:
    """The argument of paged_attention in a layer where tokens of an image see each other."""
    if not sees_later:
        return {}
    assert images is not None  # of a model that reads images
    return {"later": images.later}


def _rows_of_qkv(config: DecoderConfig, layer: int) -> dict[str, int]:
    """The rows of the projections to queries, keys and values, by name."""
    own = config.layer(layer)
    q_rows, kv_rows = (n * own.head_dim for n in (config.num_attention_heads, own.num_kv_heads))
    if config.attention_gate == GATE_OF_ELEMENTS:
        q_rows *= 2
    rows = {"q_proj": q_rows, "k_proj": kv_rows}
    return rows | {"v_proj": kv_rows} if own.has_values else rows


class BidirectionalAttention(Attention):
    """Attention over all tokens of a text, in both directions and without a cache. A window reaches
    half as far to each side.
    """

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden_size], positions [T] i64 -> [T, hidden_size]."""
        query, key, value = (
            self.qkv_proj(x).view(len(x), -1, self.head_dim).split(self._heads, dim=1)
        )
        query, key = self._normed_and_rotated(positions, query, key)
        attended = self.ops.encoder_attention(
            query, key, value, metadata, self.scale, self.sliding_window // 2
        )
        return self._projected(attended.view(len(x), self._q_rows))


def attention_for(config: DecoderConfig) -> type[Attention]:
    return BidirectionalAttention if config.is_bidirectional else Attention


class GatedMLP:
    """down(activation(gate(x)) * up(x))"""

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        layer: int,
        bias: bool,
        is_merged: bool = False,
        size: int = 0,
        names: TensorNames = PLAIN_NAMES,
    ):
        """size: the inner size; the default is the config's intermediate_size."""
        self.name = names.mlp
        size = size or config.layer(layer).intermediate_size
        shards, orders = {names.gate: size, names.up: size}, {}
        if merged := "gate_up_proj" if is_merged else names.gate_up:
            shards = {merged: 2 * size}
            if make.is_divided:
                of_parts = ((rows, size) for rows in torch.arange(2 * size).split(size))
                orders = {merged: make.kept_rows(*of_parts)}
        self.gate_up_proj = make.linear(config.hidden_size, shards, bias, orders=orders)
        self.down_proj = make.row_linear(names.down, size, config.hidden_size, bias)
        self.down_norm = (
            make.gathered_norm(names.down_norm, size, config) if names.down_norm else None
        )
        self.activate = gate_of(config.activation, make.ops)
        self.scale, (self._gate_scale, self._out_scale) = make.ops.scale, config.mlp_scales

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        gate_up = self.gate_up_proj(x)
        if self._gate_scale != 1.0:
            self.scale(gate_up[:, : gate_up.shape[1] // 2], self._gate_scale)
        x = self.activate(gate_up)
        out = self.down_proj(x if self.down_norm is None else self.down_norm(x))
        if self._out_scale != 1.0:
            self.scale(out, self._out_scale)
        return out

    def weights(self, prefix: str) -> Weights:
        for layer in (self.gate_up_proj, self.down_proj, self.down_norm):
            if layer is not None:
                yield from layer.weights(prefix)


class PlainMLP:
    """down(activation(up(x)))"""

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        layer: int,
        bias: bool,
        size: int = 0,
        names: TensorNames = PLAIN_NAMES,
    ):
        """size: the inner size; the default is the config's intermediate_size."""
        self.name = names.mlp
        size = size or config.intermediate_size
        self.up_proj = make.linear(config.hidden_size, {names.up: size}, bias)
        self.down_proj = make.row_linear(names.down, size, config.hidden_size, bias)
        self.activate = getattr(make.ops, config.activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        return self.down_proj(self.activate(self.up_proj(x)))

    def weights(self, prefix: str) -> Weights:
        yield from self.up_proj.weights(prefix)
        yield from self.down_proj.weights(prefix)


def gate_of(activation: str, ops: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function [T, 2 * I] -> [T, I]: activation(first half) * second half."""
    if activation != "relu_squared":
        return getattr(ops, f"{activation}_and_mul")

    def gate(x: torch.Tensor) -> torch.Tensor:
        of_gate, up = x.chunk(2, dim=1)
        return ops.multiply(up[:, None], ops.relu_squared(of_gate)[:, None], "none")[:, 0]

    return gate


def mlp_for(config: DecoderConfig) -> type[GatedMLP] | type[PlainMLP]:
    return GatedMLP if config.has_gated_mlp else PlainMLP
