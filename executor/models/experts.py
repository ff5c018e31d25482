"""The block of a decoder layer that is a mixture of experts.

Must not know: architectures, files, requests, how a layer with weights is made.
"""

from __future__ import annotations

from functools import cached_property

import torch

from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.experts_config import ExpertsConfig, ExpertsFormat
from ...kernels.moe import Experts
from .blocks import GatedMLP
from .layers import LayerFactory, Weights


class MixtureOfExperts:
    """The weighted sum of the experts that a router chooses for each token; plus, where there is
    one, the expert that all tokens share, times the sigmoid of its gate.
    """

    def __init__(self, make: LayerFactory, config: DecoderConfig, layer: int, names: ExpertsFormat):
        assert config.experts is not None
        self.config: ExpertsConfig = config.experts
        self.name = names.block
        self.ops, self.activation = make.ops, config.activation
        hidden_size, size = config.hidden_size, self.config.size
        self.router = make.router("gate", hidden_size, self.config.count)
        self.gate_up = [
            make.linear(hidden_size, {names.gate: size, names.up: size})
            for _ in range(self.config.count)
        ]
        self.down = [
            make.row_linear(names.down, size, hidden_size) for _ in range(self.config.count)
        ]
        self.shared: GatedMLP | None = None
        if shared_size := self.config.shared_size:
            self.shared = GatedMLP(make, config, layer, bias=False, size=shared_size)
            self.shared_gate = make.router("shared_expert_gate", hidden_size, 1)

    @cached_property
    def experts(self) -> Experts:
        """The packed weights, once all are there."""
        gate_up, down = ([layer.packed for layer in part] for part in (self.gate_up, self.down))
        return Experts(gate_up, down, self.activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        ids, weights = self.ops.route_experts(
            self.router.logits(x),
            None,
            self.config.per_token,
            "softmax",
            self.config.renormalizes,
            1.0,
            1,
            1,
        )
        out = self.ops.fused_moe(x, ids, weights, self.experts)
        if self.shared is not None:
            self.ops.add_gated(self.shared(x), self.shared_gate.logits(x), out)
        return out

    def weights(self, prefix: str) -> Weights:
        yield from self.router.weights(prefix)
        for expert, layers in enumerate(zip(self.gate_up, self.down)):
            for layer in layers:
                yield from layer.weights(f"{prefix}experts.{expert}.")
        if self.shared is not None:
            yield from self.shared.weights(f"{prefix}shared_expert.")
            yield from self.shared_gate.weights(prefix)


def experts_or_mlp(
    make: LayerFactory, config: DecoderConfig, names: ExpertsFormat | None, layer: int
) -> MixtureOfExperts | GatedMLP:
    """The block of this layer of a model with experts, which may be dense."""
    assert names is not None and config.experts is not None
    if layer in config.experts.dense_layers:
        return make.block(GatedMLP, config, layer, bias=False)
    return make.block(MixtureOfExperts, config, layer, names)
