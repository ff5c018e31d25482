"""The mixer of Mamba 2 (Dao & Gu 2024): a short convolution, a recurrence, and a gate.

Must not know: architectures, files, requests, how a layer with weights is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from ...ipc.models.mamba_config import Mamba2Config
from ...kernels.ops import AttentionMetadata
from ..weights.table import RowOrder, kept_part
from .layers import LayerFactory, Weights


class Mamba2Mixer:
    """out_proj(gated norm of the recurrence over silu(convolution of x, B and C)). One projection
    gives the gate z, x, B, C and the steps dt.

    Steps are not clamped: transformers raises them to time_step_min in prefill but not in decoding,
    so that its own results differ between the two.
    """

    def __init__(self, make: LayerFactory, hidden_size: int, mixer: Mamba2Config):
        self.config = own = mixer.of_rank(make.group.size)
        self.ops = make.ops
        self._orders = kept_rows(make, mixer) if make.is_divided else {}
        in_proj = {name: rows for name, rows in self._orders.items() if name == "in_proj"}
        rows = {"in_proj": sum(mixer.part_sizes)}
        self.in_proj = make.linear(hidden_size, rows, mixer.has_in_bias, orders=in_proj)
        self.conv_weight = make.parameter(own.conv_size, 1, mixer.kernel_size)
        self.conv_bias = make.parameter(own.conv_size) if mixer.has_conv_bias else None
        self.a_log, self.d, self.dt_bias = (make.head_parameter(mixer.num_heads) for _ in range(3))
        # The features of a group are normed together. Where ranks have parts of a group, each norms
        # all of them.
        self._group_size = mixer.inner_size // mixer.num_groups
        self._gather: Callable[[torch.Tensor], torch.Tensor] | None = None
        if mixer.has_norm and own.inner_size < self._group_size:
            self._gather = make.gather
            del self._orders["norm"]
        begin = make.group.rank * own.inner_size
        self._features = slice(begin, begin + own.inner_size)  # of this rank
        num_normed = own.inner_size if self._gather is None else mixer.inner_size
        self.norm_weight = make.parameter(num_normed) if mixer.has_norm else None
        self.out_proj = make.row_linear(
            "out_proj", mixer.inner_size, hidden_size, mixer.has_out_bias
        )
        # Factors multiply activations and not weights: a weight may be packed in few bits, and one
        # in bf16 would be rounded again.
        ends = list(accumulate(own.part_sizes))
        self._scaled_parts = [
            (end - size, end, scale)
            for size, end, scale in zip(own.part_sizes, ends, own.part_scales)
            if scale != 1.0
        ]
        self.state_parts = own.state_parts
        # [places, kernel_size - 1, channels] and [places, heads, head_dim, state_size] fp32
        self.conv_state: torch.Tensor | None = None
        self.scan_state: torch.Tensor | None = None

    def bind_states(self, parts: Sequence[torch.Tensor]) -> None:
        """Makes these its states: [places, *shape] of each part. An empty list takes them away."""
        self.conv_state, self.scan_state = parts if parts else (None, None)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]. The states of the step's requests move on by its
        tokens.
        """
        ops, config = self.ops, self.config
        heads = len(x), config.num_heads, config.head_dim
        groups = len(x), config.num_groups, config.state_size
        projected = self.in_proj(x)
        for begin, end, factor in self._scaled_parts:
            ops.scale(projected[:, begin:end], factor)
        inner, conv_size = config.inner_size, config.conv_size
        z, mixed, dt = projected.split([inner, conv_size, config.num_heads], dim=1)
        mixed = ops.short_conv(
            mixed, self.conv_weight[:, 0], self.conv_bias, self.conv_state, metadata, "silu"
        )
        x, b, c = mixed.split(config.part_sizes[1:4], dim=1)
        out = ops.selective_scan(
            x.view(heads),
            dt,
            b.view(groups),
            c.view(groups),
            self.a_log,
            self.d,
            self.dt_bias,
            self.scan_state,
            metadata,
        )
        if self.norm_weight is None:
            gated = ops.multiply(out, z.view(heads), "silu").view(-1, inner)
        else:
            out = out.view(-1, inner)
            if self._gather is not None:
                out, z = self._gather(out), self._gather(z)
            gated = ops.gated_rms_norm(
                out, z, self.norm_weight, config.eps, self._group_size, config.gate_first
            )
            if self._gather is not None:
                gated = gated[:, self._features]
        out = self.out_proj(gated)
        if config.out_scale != 1.0:
            ops.scale(out, config.out_scale)
        return out

    def weights(self, prefix: str) -> Weights:
        yield from self.in_proj.weights(prefix)
        channels = self._orders.get("conv1d")
        yield f"{prefix}conv1d.weight", kept_part(self.conv_weight, channels)
        if self.conv_bias is not None:
            yield f"{prefix}conv1d.bias", kept_part(self.conv_bias, channels)
        yield f"{prefix}A_log", self.a_log
        yield f"{prefix}D", self.d
        yield f"{prefix}dt_bias", self.dt_bias
        if self.norm_weight is not None:
            yield f"{prefix}norm.weight", kept_part(self.norm_weight, self._orders.get("norm"))
        yield from self.out_proj.weights(prefix)


def kept_rows(make: LayerFactory, mixer: Mamba2Config) -> dict[str, RowOrder]:
    """By the name of a tensor: the rows that this rank keeps, those of its heads and groups."""
    num_heads, num_groups = mixer.num_heads, mixer.num_groups
    heads = num_heads, num_heads, num_groups, num_groups, num_heads
    rows = torch.arange(sum(mixer.part_sizes)).split(mixer.part_sizes)
    of_parts = list(zip(rows, heads))
    channels = [(part - mixer.inner_size, count) for part, count in of_parts[1:4]]
    return {
        "in_proj": make.kept_rows(*of_parts),
        "conv1d": make.kept_rows(*channels),
        "norm": make.kept_rows(of_parts[0]),
    }
