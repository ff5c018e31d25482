"""Kimi Delta Attention (Moonshot AI 2025): the gated delta rule with a decay for each feature of a
key.

Must not know: architectures, files, requests, how a layer with weights is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ipc.models.mixers import KimiDeltaConfig
from ...kernels.ops import AttentionMetadata
from ..weights.table import RowOrder, Slice, Weight, kept_part
from .layers import LayerFactory, Weights

PARTS = ("q", "k", "v")


class KimiDelta:
    """Linear attention after short convolutions of queries, keys and values, and before a norm of
    each head and a gate. What decays and gates are made of goes through a vector as small as a
    head, which every rank has whole.
    """

    def __init__(self, make: LayerFactory, hidden_size: int, mixer: KimiDeltaConfig):
        self.config = own = mixer.of_rank(make.group.size)
        self.ops, self.eps, self.state_parts = make.ops, mixer.eps, own.state_parts
        size, head_dim, heads = mixer.size, mixer.head_dim, mixer.num_heads
        qkv = {f"{part}_proj": size for part in PARTS}
        self.in_proj = make.linear(hidden_size, qkv, unit=head_dim)
        self.beta_proj = make.linear(hidden_size, {"b_proj": heads})
        vectors = {"f_a_proj": head_dim, "g_a_proj": head_dim}
        self.a_proj = make.linear(hidden_size, vectors, is_divided=False)
        self.decay_proj = make.linear(head_dim, {"f_b_proj": size}, unit=head_dim)
        self.gate_proj = make.linear(head_dim, {"g_b_proj": size}, unit=head_dim)
        self.o_proj = make.row_linear("o_proj", size, hidden_size)
        self.conv1d = make.parameter(3 * own.size, 1, own.kernel_size)
        self.a_log = make.parameter(own.num_heads, dtype=torch.float32)
        self.dt_bias = make.parameter(own.num_heads, head_dim, dtype=torch.float32)
        self.norm_weight = make.parameter(head_dim, dtype=torch.float32)
        self._rows: RowOrder | None = None  # that this rank has of a tensor of all heads
        self._heads: Slice | None = None
        if make.is_divided:
            self._rows = make.kept_rows((torch.arange(size), heads))
            begin, end = make.group.range_of(heads)
            self._heads = Slice(2, begin, end, heads)
        self.bind_states([])

    def bind_states(self, parts: Sequence[torch.Tensor]) -> None:
        """Makes these its states: [places, kernel_size - 1, channels] and [places, heads, head_dim,
        head_dim] fp32. An empty list takes the states away.
        """
        self.conv_state, self.state = parts or (None, None)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]. The states of the step's requests move on by its
        tokens.
        """
        ops, own = self.ops, self.config
        heads = len(x), own.num_heads, own.head_dim
        kernel = self.conv1d.view(-1, own.kernel_size)
        qkv = ops.short_conv(self.in_proj(x), kernel, None, self.conv_state, metadata, "silu")
        query, key, value = (part.view(heads) for part in qkv.split(own.size, dim=1))
        of_decay, of_gate = self.a_proj(x).split(own.head_dim, dim=1)
        mixed = ops.gated_delta_rule(
            query,
            key,
            value,
            self.decay_proj(of_decay).view(heads),
            self.beta_proj(x),
            self.a_log,
            self.dt_bias,
            self.state,
            metadata,
            False,
        )
        normed = ops.rms_norm(mixed, self.norm_weight, self.eps)
        gated = ops.multiply(normed, self.gate_proj(of_gate).view(heads), "sigmoid")
        return self.o_proj(gated.view(len(x), own.size))

    def weights(self, prefix: str) -> Weights:
        for layer in (self.in_proj, self.beta_proj, self.a_proj, self.decay_proj, self.gate_proj):
            yield from layer.weights(prefix)
        for part, kernel in zip(PARTS, self.conv1d.split(self.config.size)):
            yield f"{prefix}{part}_conv1d.weight", kept_part(kernel, self._rows)
        a_log = self.a_log.view(1, 1, -1, 1)
        yield f"{prefix}A_log", a_log if self._heads is None else Weight(a_log, part=self._heads)
        yield f"{prefix}dt_bias", kept_part(self.dt_bias.view(-1), self._rows)
        yield f"{prefix}o_norm.weight", self.norm_weight
        yield from self.o_proj.weights(prefix)
