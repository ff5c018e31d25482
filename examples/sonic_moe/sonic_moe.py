"""A plugin for Quire: dense MLPs become fine-grained mixtures of experts, in the inference form of
SonicMoE (Guo et al. 2025): gather rows by expert, GEMM, activation, GEMM, scatter.

Each expert is a slice of the dense MLP. With all experts the layer computes what the dense one
does. SONIC_MOE_TOP_K=2 lets a router choose two experts per token: those whose gate weights, on
average, agree most with the token (MoEfication; Zhang et al. 2022).
"""

import os
from collections.abc import Callable

import torch
from quire.executor.models import register_layer
from quire.kernels import ops
from quire.kernels.registry import operation, register
from torch import Tensor

EXPERTS = 10
TOP_K = int(os.environ.get("SONIC_MOE_TOP_K", EXPERTS))


@operation
def pack_sonic_moe(gate_up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """gate_up [E, 2 * I, H], down [E, H, I] -> a function of x [T, H] and expert_ids [T, K] i32:
    the sum [T, H] of down(silu_and_mul(gate_up(x))) over a token's experts, in their order.
    """


def add_in_order(results: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    """[T * K, H] fp32 -> [T, H]; one order of additions for all batches."""
    return sum(results.unflatten(0, (-1, top_k)).unbind(1)).to(dtype)


@register("pack_sonic_moe", name="reference", priority=0)
def pack_reference(gate_up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, expert_ids: Tensor) -> Tensor:
        ids, top_k = expert_ids.flatten().long(), expert_ids.shape[1]
        both = torch.einsum("pih,ph->pi", gate_up[ids], x.repeat_interleave(top_k, 0))
        results = torch.einsum("phi,pi->ph", down[ids].float(), ops.silu_and_mul(both).float())
        return add_in_order(results, top_k, x.dtype)

    return run


@register("pack_sonic_moe", name="cpu", priority=10, predicate=lambda facts: facts.device == "cpu")
def pack_cpu(gate_up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """With Quire's linear layers: their results for a row do not depend on the other rows."""
    first, second = ([ops.pack_linear(w, None) for w in stack] for stack in (gate_up, down))

    def run(x: Tensor, expert_ids: Tensor) -> Tensor:
        pairs, top_k = expert_ids.flatten(), expert_ids.shape[1]
        results = torch.empty(len(pairs), x.shape[1], dtype=torch.float32)
        for expert in pairs.unique().tolist():
            mine = (pairs == expert).nonzero().flatten()
            inner = ops.silu_and_mul(first[expert](x[mine // top_k]))
            results[mine] = second[expert](inner).float()
        return add_in_order(results, top_k, x.dtype)

    return run


@register("pack_sonic_moe", name="triton", predicate=lambda facts: facts.device == "cuda")
def pack_triton(gate_up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    import sonic_moe_triton

    return sonic_moe_triton.pack(gate_up, down)


class SonicMoE:
    """In place of quire's GatedMLP: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, make, config, layer: int, bias: bool, is_merged: bool = False):
        self.name, self.ops, self.experts = "mlp", make.ops, None
        self.gate_up = make.parameter(2, config.intermediate_size, config.hidden_size)
        self.down = make.parameter(config.hidden_size, config.intermediate_size)

    def weights(self, prefix: str):
        """The checkpoint's names, with the tensors that they fill."""
        yield f"{prefix}gate_proj.weight", self.gate_up[0]
        yield f"{prefix}up_proj.weight", self.gate_up[1]
        yield f"{prefix}down_proj.weight", self.down

    def __call__(self, x: Tensor) -> Tensor:
        if self.experts is None:  # at the first call all weights are there
            gate_up = self.gate_up.unflatten(1, (EXPERTS, -1)).transpose(0, 1)  # [E, 2, I, H]
            down = self.down.unflatten(1, (EXPERTS, -1)).transpose(0, 1).contiguous()
            self.experts = self.ops.pack_sonic_moe(gate_up.flatten(1, 2), down)
            self.router = self.ops.pack_linear(gate_up[:, 0].float().mean(1).to(x.dtype), None)
        ids, _ = self.ops.route_experts(
            self.router(x).float(), None, TOP_K, "softmax", False, 1.0, 1, 1
        )
        return self.experts(x, ids)


def fits(config, layer: int) -> bool:
    return config.activation == "silu" and config.intermediate_size % EXPERTS == 0


register_layer("GatedMLP", SonicMoE, when=fits)
