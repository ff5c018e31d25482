"""The mixer of Mamba 2 (Dao & Gu 2024): a short convolution, a recurrence, and a gate.

Must not know: architectures, files, requests, how a layer with weights is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ...ipc.errors import InvalidParameterError
from ...ipc.models.mamba_config import Mamba2Config
from ...kernels.ops import AttentionMetadata
from .layers import LayerFactory, Weights


class Mamba2Mixer:
    """out_proj(gated norm of the recurrence over silu(convolution of x, B and C)). One projection
    gives the gate z, x, B, C and the steps dt.

    Steps are not clamped: transformers raises them to time_step_min in prefill but not in decoding,
    so that its own results differ between the two.
    """

    def __init__(self, make: LayerFactory, hidden_size: int, mixer: Mamba2Config):
        if make.group.size > 1:
            raise InvalidParameterError(
                "tensor_parallel_size",
                f"must be 1 for layers of Mamba 2, which are not divided, got {make.group.size}",
            )
        self.config, self.ops = mixer, make.ops
        num_heads, fp32 = mixer.num_heads, torch.float32
        rows = {"in_proj": sum(mixer.part_sizes)}
        self.in_proj = make.linear(hidden_size, rows, mixer.has_in_bias)
        self.conv_weight = make.parameter(mixer.conv_size, 1, mixer.kernel_size)
        self.conv_bias = make.parameter(mixer.conv_size) if mixer.has_conv_bias else None
        self.a_log, self.d, self.dt_bias = (
            make.parameter(num_heads, dtype=fp32),
            make.parameter(num_heads, dtype=fp32),
            make.parameter(num_heads, dtype=fp32),
        )
        self.norm_weight = make.parameter(mixer.inner_size) if mixer.has_norm else None
        self.out_proj = make.row_linear(
            "out_proj", mixer.inner_size, hidden_size, mixer.has_out_bias
        )
        # Factors multiply activations and not weights: a weight may be packed in few bits, and one
        # in bf16 would be rounded again.
        ends = list(accumulate(mixer.part_sizes))
        self._scaled_parts = [
            (end - size, end, scale)
            for size, end, scale in zip(mixer.part_sizes, ends, mixer.part_scales)
            if scale != 1.0
        ]
        self.state_parts = mixer.state_parts
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
            size = inner // config.num_groups
            gated = ops.gated_rms_norm(
                out.view(-1, inner), z, self.norm_weight, config.eps, size, config.gate_first
            )
        out = self.out_proj(gated)
        if config.out_scale != 1.0:
            ops.scale(out, config.out_scale)
        return out

    def weights(self, prefix: str) -> Weights:
        yield from self.in_proj.weights(prefix)
        yield f"{prefix}conv1d.weight", self.conv_weight
        if self.conv_bias is not None:
            yield f"{prefix}conv1d.bias", self.conv_bias
        yield f"{prefix}A_log", self.a_log
        yield f"{prefix}D", self.d
        yield f"{prefix}dt_bias", self.dt_bias
        if self.norm_weight is not None:
            yield f"{prefix}norm.weight", self.norm_weight
        yield from self.out_proj.weights(prefix)
