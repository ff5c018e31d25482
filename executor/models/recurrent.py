"""The recurrent mixers of a decoder layer: Gated DeltaNet and the gated short convolution.

Must not know: architectures, files, requests, where states lie, how a layer with weights is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...ipc.models.mamba_config import Mamba2Config
from ...ipc.models.mixers import GatedDeltaNetConfig, ShortConvConfig
from ...ipc.models.state_layout import StatePart
from ...kernels.ops import AttentionMetadata
from ..weights.table import RowOrder
from .layers import LayerFactory, Weights
from .mamba import Mamba2Mixer


class Mixer(Protocol):
    """A block of a layer that keeps a state of each request (executor/model.py: StateLayer)."""

    state_parts: tuple[StatePart, ...]

    def bind_states(self, parts: Sequence[torch.Tensor]) -> None: ...

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden_size], positions [T] i64 -> [T, hidden_size]. The states of the requests are
        those after the T tokens, as metadata.states says.
        """
        ...

    def weights(self, prefix: str) -> Weights: ...


class GatedDeltaNet:
    """Linear attention by the gated delta rule (Yang et al. 2024), after a short convolution of
    queries, keys and values, and before a norm of each value head with a gate.
    """

    def __init__(self, make: LayerFactory, hidden_size: int, mixer: GatedDeltaNetConfig):
        self.config, self.ops, self.state_parts = mixer, make.ops, mixer.state_parts
        size, heads = hidden_size, mixer.num_value_heads
        orders = rows_by_kind(mixer) if mixer.is_by_key_head else {}
        gated, scalars = mixer.projections()
        # adapters have the value heads in the order of safetensors files
        options = {"orders": orders, "takes_adapters": not mixer.is_interleaved}
        self.in_proj = make.linear(size, gated, **options)
        self.in_proj_ba = make.linear(size, scalars, **options)
        self.out_proj = make.linear(
            mixer.value_size, {"out_proj": size}, takes_adapters=not mixer.is_interleaved
        )
        self.conv1d = make.parameter(mixer.conv_size, 1, mixer.kernel_size)
        self.a_log = make.parameter(heads, dtype=torch.float32)
        self.dt_bias = make.parameter(heads, dtype=torch.float32)
        self.norm_weight = make.parameter(mixer.value_head_dim)
        self.bind_states([])

    def bind_states(self, parts: Sequence[torch.Tensor]) -> None:
        """Makes these its states: [places, kernel_size - 1, channels] and [places, value heads, key
        head size, value head size] fp32. An empty list takes the states away.
        """
        self.conv_state, self.state = parts or (None, None)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """See Mixer."""
        ops, own, num_tokens = self.ops, self.config, len(x)
        qkv, gate = self.in_proj(x).split((own.conv_size, own.value_size), dim=1)
        beta, decay = self.in_proj_ba(x).split(own.num_value_heads, dim=1)
        kernel = self.conv1d.view(own.conv_size, own.kernel_size)
        qkv = ops.short_conv(qkv, kernel, None, self.conv_state, metadata, "silu")
        query, key, value = qkv.split((own.key_size, own.key_size, own.value_size), dim=1)
        keys = num_tokens, own.num_key_heads, own.key_head_dim
        mixed = ops.gated_delta_rule(
            query.view(keys),
            key.view(keys),
            value.view(num_tokens, own.num_value_heads, own.value_head_dim),
            decay,
            beta,
            self.a_log,
            self.dt_bias,
            self.state,
            metadata,
            own.is_interleaved,
        )
        normed = ops.gated_rms_norm(
            mixed.view(num_tokens, own.value_size),
            gate,
            self.norm_weight,
            own.eps,
            own.value_head_dim,
            False,
        )
        return self.out_proj(normed)

    def weights(self, prefix: str) -> Weights:
        yield from self.in_proj.weights(prefix)
        yield from self.in_proj_ba.weights(prefix)
        yield f"{prefix}conv1d.weight", self.conv1d
        yield f"{prefix}A_log", self.a_log
        yield f"{prefix}dt_bias", self.dt_bias
        yield f"{prefix}norm.weight", self.norm_weight
        yield from self.out_proj.weights(prefix)


def rows_by_kind(config: GatedDeltaNetConfig) -> dict[str, RowOrder]:
    """The order that puts rows of all queries first, then those of keys, values and gates, and
    those of beta before decay, where the checkpoint has all rows of a key head together.
    """
    per_key = config.num_value_heads // config.num_key_heads
    values = per_key * config.value_head_dim
    parts = {
        "in_proj_qkvz": (config.key_head_dim, config.key_head_dim, values, values),
        "in_proj_ba": (per_key, per_key),
    }
    return {name: _by_part(config.num_key_heads, sizes) for name, sizes in parts.items()}


def _by_part(num_heads: int, sizes: tuple[int, ...]) -> RowOrder:
    """sizes: of the parts of a head's rows."""
    stored = torch.arange(num_heads * sum(sizes)).view(num_heads, -1)
    return RowOrder(torch.cat([part.flatten() for part in stored.split(sizes, dim=1)]))


class ShortConv:
    """A causal convolution of a few tokens between two gates (LFM2; Liquid AI 2025)."""

    def __init__(self, make: LayerFactory, hidden_size: int, mixer: ShortConvConfig):
        self.ops, self.state_parts = make.ops, mixer.state_parts
        size, has_bias = hidden_size, mixer.has_bias
        self.in_proj = make.linear(size, {"in_proj": 3 * size}, has_bias)
        self.out_proj = make.linear(size, {"out_proj": size}, has_bias)
        self.conv = make.parameter(size, 1, mixer.kernel_size)
        self.conv_bias = make.parameter(size) if has_bias else None
        self.bind_states([])

    def bind_states(self, parts: Sequence[torch.Tensor]) -> None:
        """Makes [places, kernel_size - 1, hidden_size] its states. An empty list takes them
        away.
        """
        (self.conv_state,) = parts or (None,)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """See Mixer."""
        ops, num_tokens = self.ops, len(x)
        # a head of all features: [T, 1, hidden_size]
        before, after, value = self.in_proj(x).view(num_tokens, 3, -1).split(1, dim=1)
        gated = ops.multiply(value, before, "none").view(num_tokens, -1)
        kernel = self.conv.view(len(self.conv), -1)
        mixed = ops.short_conv(gated, kernel, self.conv_bias, self.conv_state, metadata, "none")
        gated = ops.multiply(mixed.view(num_tokens, 1, -1), after, "none")
        return self.out_proj(gated.view(num_tokens, -1))

    def weights(self, prefix: str) -> Weights:
        yield from self.in_proj.weights(prefix)
        yield f"{prefix}conv.weight", self.conv
        if self.conv_bias is not None:
            yield f"{prefix}conv.bias", self.conv_bias
        yield from self.out_proj.weights(prefix)


# By its configuration, the class of a mixer. It is called with the factory, hidden_size and the
# configuration.
MIXERS: dict[type, Callable[..., Mixer]] = {
    GatedDeltaNetConfig: GatedDeltaNet,
    ShortConvConfig: ShortConv,
    Mamba2Config: Mamba2Mixer,
}
