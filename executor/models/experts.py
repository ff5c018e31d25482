"""The block of a decoder layer that is a mixture of experts.

Must not know: architectures, files, requests, how a layer with weights is made.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ...ipc.models.architectures import PLAIN_NAMES, TensorNames
from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.experts_config import ExpertsConfig
from ...kernels.moe import ClampedSwiGLU, Experts
from ..groups.expert_group import ExpertGroup
from ..model import RoutedTokens
from .blocks import GatedMLP, PlainMLP, mlp_for
from .layers import LayerFactory, Linear, Weights


class DividedExperts:
    """Called like `fused_moe`, with the experts that this engine has: rows go to the engines that
    have their experts, and come back.

    The result has the bits of `fused_moe` with all experts: an expert returns the same numbers for
    a row in any company, and the row's engine adds them in the order of the row's ids.
    """

    def __init__(self, ops: Any, group: ExpertGroup, share: int):
        """Each engine has `share` experts; the first engine has the first ones."""
        self.ops, self._group, self._share = ops, group, share

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        """x [T, H], ids [T, K] i32 of all experts, weights [T, K] fp32 -> [T, H]."""
        group = self._group
        all_x, all_ids, num_rows = group.gather(x, ids)
        is_mine = all_ids // self._share == group.rank
        rows, slots = is_mine.nonzero(as_tuple=True)  # in the order of engines, rows and slots
        own_ids = all_ids[rows, slots] - group.rank * self._share
        returned = self.ops.expert_outputs(all_x[rows], own_ids[:, None], experts)[:, 0]
        sent = [int(of_engine.sum()) for of_engine in is_mine.split(num_rows)]
        engine_of = (ids.flatten() // self._share).long()
        received = torch.bincount(engine_of, minlength=group.size).tolist()
        places = engine_of.argsort(stable=True)
        by_slot = torch.empty(len(places), x.shape[1])
        by_slot[places] = group.scatter(returned, sent, received)
        return self.ops.weighted_sum(by_slot.view(*ids.shape, -1), weights, x.dtype)


class MixtureOfExperts:
    """The weighted sum of the experts that a router chooses for each token. Where there is an
    expert that all tokens share, its result is added, times the sigmoid of its gate if it has one.
    """

    def __init__(
        self,
        make: LayerFactory,
        config: DecoderConfig,
        layer: int,
        names_of_parts: TensorNames = PLAIN_NAMES,
    ):
        """names_of_parts: of the shared expert; see ipc/models/architectures.py."""
        assert config.experts is not None
        self.config: ExpertsConfig = config.experts
        names = self.config.names
        self.name = names.block
        self.ops = make.ops
        self.all_reduce = make.all_reduce
        clamp = self.config.clamped_swiglu
        self.activation = config.activation if clamp is None else ClampedSwiGLU(*clamp)
        hidden_size, size, bias = config.hidden_size, self.config.size, names.has_biases
        counts = torch.zeros(self.config.count, dtype=torch.int64, device=make.device)
        self.routed = RoutedTokens(counts)
        self.router = make.router(names.router, hidden_size, self.config.count, bias)
        self.correction: torch.Tensor | None = None
        if names.correction is not None:
            self.correction = make.parameter(self.config.count, dtype=torch.float32)
        # what experts read and return, if that is not the hidden states
        self.latent_in: Linear | None = None
        self.latent_out: Linear | None = None
        width = hidden_size
        if self.config.latent_size:
            width = self.config.latent_size
            latent_in, latent_out = {names.latent_in: width}, {names.latent_out: hidden_size}
            self.latent_in = make.linear(hidden_size, latent_in, is_divided=False)
            self.latent_out = make.linear(width, latent_out, is_divided=False)
        self.own = make.own_experts(self.config.count)
        shards = {names.up: size} if names.gate is None else {names.gate: size, names.up: size}
        self.gate_up = [make.linear(width, shards, bias, takes_adapters=False) for _ in self.own]
        self.down = [
            make.row_linear(names.down, size, width, bias, takes_adapters=False) for _ in self.own
        ]
        self.divided = None
        if make.expert_group.size > 1:
            self.divided = DividedExperts(make.ops, make.expert_group, len(self.own))
        self.shared: GatedMLP | PlainMLP | None = None
        self.shared_gate: Linear | None = None
        if shared_size := self.config.shared_size:
            kind = mlp_for(config)
            self.shared = kind(make, config, layer, False, size=shared_size, names=names_of_parts)
            if names.shared_gate is not None:
                self.shared_gate = make.router(names.shared_gate, hidden_size, 1)

    @cached_property
    def experts(self) -> Experts:
        """The packed weights of this engine's experts, once all are there."""
        gate_up, down = ([layer.packed for layer in part] for part in (self.gate_up, self.down))
        return Experts(gate_up, down, self.activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        return self.mix(x, *self.route(x))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] -> ids [T, K] i32 and weights [T, K] fp32 of each token's experts."""
        config = self.config
        ids, weights = self.ops.route_experts(
            self.router.logits(x),
            self.correction,
            config.per_token,
            config.names.scoring,
            config.renormalizes,
            config.scale,
            config.num_groups,
            config.top_groups,
            config.names.group_best,
            config.names.added,
        )
        self.ops.count_experts(ids, self.routed.slots, self.routed.counts)
        return ids, weights

    def mix(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], and what `route` returns -> [T, hidden_size]"""
        mix = self.ops.fused_moe if self.divided is None else self.divided
        latent = x if self.latent_in is None else self.latent_in(x)
        out = self.all_reduce(mix(latent, ids, weights, self.experts))
        if self.latent_out is not None:
            out = self.latent_out(out)
        if self.shared is not None and self.shared_gate is not None:
            self.ops.add_gated(self.shared(x), self.shared_gate.logits(x), out)
        elif self.shared is not None:
            self.ops.add(self.shared(x), out)
        return out

    def weights(self, prefix: str) -> Weights:
        names = self.config.names
        yield from self.router.weights(prefix)
        if self.correction is not None:
            shape = names.correction_shape(self.config)
            yield f"{prefix}{names.correction}", self.correction.view(shape)
        for latent in (self.latent_in, self.latent_out):
            if latent is not None:
                yield from latent.weights(prefix)
        for expert, layers in zip(self.own, zip(self.gate_up, self.down)):
            for layer in layers:
                yield from layer.weights(f"{prefix}{names.experts}.{expert}.")
        if self.shared is not None:
            yield from self.shared.weights(f"{prefix}{names.shared}.")
        if self.shared_gate is not None:
            yield from self.shared_gate.weights(prefix)
