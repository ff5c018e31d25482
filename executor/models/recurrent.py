"""The recurrent mixers of a decoder layer: Gated DeltaNet and the gated short convolution.

Must not know: architectures, files, requests, where states lie, how a layer with weights is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...ipc.models.mamba_config import Mamba2Config
from ...ipc.models.mixers import GatedDeltaNetConfig, KimiDeltaConfig, ShortConvConfig
from ...kernels.ops import AttentionMetadata
from ..model import StateLayer
from ..weights.table import RowOrder, kept_part
from .kimi_delta import KimiDelta
from .layers import LayerFactory, Weights
from .mamba import Mamba2Mixer


class Mixer(StateLayer, Protocol):
    """A block of a layer that keeps a state of each request."""

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
        own = mixer.of_rank(make.group.size)
        self.config, self.ops, self.state_parts = own, make.ops, own.state_parts
        size, heads = hidden_size, mixer.num_value_heads
        order = value_heads_of_ranks(mixer, make.group.size)
        self._orders = orders = {
            name: make.kept_rows(*parts)
            for name, parts in stored_rows(mixer, order).items()
            if make.is_divided or name in BY_KEY_HEAD  # else the tensor is as it is stored
        }
        # adapters have the value heads in the order of safetensors files
        takes_adapters = not mixer.is_interleaved
        self.in_proj, self.in_proj_ba = (
            make.linear(
                size,
                shards,
                takes_adapters=takes_adapters,
                orders={name: orders[name] for name in shards if name in orders},
            )
            for shards in mixer.projections()
        )
        self.out_proj = make.row_linear(
            "out_proj",
            mixer.value_size,
            size,
            takes_adapters=takes_adapters,
            order=_features_of(order, mixer.value_head_dim) if mixer.is_interleaved else None,
        )
        self.conv1d = make.parameter(own.conv_size, 1, own.kernel_size)
        self.a_log, self.dt_bias = (make.head_parameter(heads, order) for _ in range(2))
        self.norm_weight = make.parameter(own.value_head_dim)
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
        yield f"{prefix}conv1d.weight", kept_part(self.conv1d, self._orders.get("conv1d"))
        yield f"{prefix}A_log", self.a_log
        yield f"{prefix}dt_bias", self.dt_bias
        yield f"{prefix}norm.weight", self.norm_weight
        yield from self.out_proj.weights(prefix)


# Tensors whose rows are those of one key head after another.
BY_KEY_HEAD = ("in_proj_qkvz", "in_proj_ba")


def value_heads_of_ranks(config: GatedDeltaNetConfig, size: int) -> torch.Tensor:
    """The stored value heads [num_value_heads] i64, those of the first of `size` ranks first. A
    rank has those of its key heads, in the order of the file: where they are interleaved there,
    they are so on the rank.
    """
    heads = torch.arange(config.num_value_heads)
    if not config.is_interleaved:
        return heads
    by_key = heads.view(-1, config.num_key_heads).T
    return by_key.reshape(size, -1).sort(dim=1).values.flatten()


def stored_rows(
    config: GatedDeltaNetConfig, value_heads: torch.Tensor
) -> dict[str, list[tuple[torch.Tensor, int]]]:
    """By the name of a tensor: the stored rows of its parts, head by head, and how many heads they
    have. Rows of all queries come first, then those of keys, values and gates; those of beta before
    those of decay. value_heads: see value_heads_of_ranks.
    """
    of_keys, of_values = config.num_key_heads, config.num_value_heads
    per_key = of_values // of_keys
    values = per_key * config.value_head_dim
    queries, keys = torch.arange(2 * config.key_size).chunk(2)
    rows = _features_of(value_heads, config.value_head_dim)
    channels = [(queries, of_keys), (keys, of_keys), (rows + 2 * config.key_size, of_values)]
    scalars = [(value_heads, of_values)]
    heads = of_keys, of_keys, of_values, of_values
    together = _by_part(of_keys, (config.key_head_dim, config.key_head_dim, values, values))
    return {
        "in_proj_qkv": channels,
        "in_proj_z": [(rows, of_values)],
        "in_proj_b": scalars,
        "in_proj_a": scalars,
        "in_proj_qkvz": list(zip(together, heads)),
        "in_proj_ba": list(zip(_by_part(of_keys, (per_key, per_key)), heads[2:])),
        "conv1d": channels,
    }


def _features_of(heads: torch.Tensor, size: int) -> torch.Tensor:
    """The stored features of these heads [heads * size], of `size` features each."""
    return (heads[:, None] * size + torch.arange(size)).flatten()


def _by_part(num_heads: int, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The stored rows of each part, where those of a head are neighbours. sizes: of its parts."""
    stored = torch.arange(num_heads * sum(sizes)).view(num_heads, -1)
    return [part.flatten() for part in stored.split(sizes, dim=1)]


class ShortConv:
    """A causal convolution of a few tokens between two gates (LFM2; Liquid AI 2025)."""

    def __init__(self, make: LayerFactory, hidden_size: int, mixer: ShortConvConfig):
        own = mixer.of_rank(make.group.size)
        self.ops, self.state_parts = make.ops, own.state_parts
        size, has_bias = hidden_size, mixer.has_bias
        orders: dict[str, RowOrder] = {}
        self._channels: RowOrder | None = None  # that this rank has, if not all
        if make.is_divided:
            channels = torch.arange(size)
            self._channels = make.kept_rows((channels, size))
            of_parts = ((channels + begin, size) for begin in (0, size, 2 * size))
            orders["in_proj"] = make.kept_rows(*of_parts)
        self.in_proj = make.linear(size, {"in_proj": 3 * size}, has_bias, orders=orders)
        self.out_proj = make.row_linear("out_proj", size, size, has_bias)
        self.conv = make.parameter(own.size, 1, mixer.kernel_size)
        self.conv_bias = make.parameter(own.size) if has_bias else None
        self.bind_states([])

    def bind_states(self, parts: Sequence[torch.Tensor]) -> None:
        """Makes [places, kernel_size - 1, channels] its states. An empty list takes them away."""
        (self.conv_state,) = parts or (None,)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """See Mixer."""
        ops, num_tokens = self.ops, len(x)
        # a head of all channels: [T, 1, channels]
        before, after, value = self.in_proj(x).view(num_tokens, 3, -1).split(1, dim=1)
        gated = ops.multiply(value, before, "none").view(num_tokens, -1)
        kernel = self.conv.view(len(self.conv), -1)
        mixed = ops.short_conv(gated, kernel, self.conv_bias, self.conv_state, metadata, "none")
        gated = ops.multiply(mixed.view(num_tokens, 1, -1), after, "none")
        return self.out_proj(gated.view(num_tokens, -1))

    def weights(self, prefix: str) -> Weights:
        yield from self.in_proj.weights(prefix)
        yield f"{prefix}conv.weight", kept_part(self.conv, self._channels)
        if self.conv_bias is not None:
            yield f"{prefix}conv.bias", kept_part(self.conv_bias, self._channels)
        yield from self.out_proj.weights(prefix)


# By its configuration, the class of a mixer. It is called with the factory, hidden_size and the
# configuration.
MIXERS: dict[type, Callable[..., Mixer]] = {
    GatedDeltaNetConfig: GatedDeltaNet,
    KimiDeltaConfig: KimiDelta,
    ShortConvConfig: ShortConv,
    Mamba2Config: Mamba2Mixer,
}
