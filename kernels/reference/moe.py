"""Specifies mixtures of experts.

Must not know: speed.
"""

from functools import partial

import torch
from torch import Tensor

from ..moe import ClampedSwiGLU, Experts
from ..registry import register
from .activation import gelu_tanh_and_mul, silu_and_mul
from .encoder import relu_squared
from .quantized import fused

ACTIVATIONS = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
    "relu_squared": relu_squared,
}


@register("route_experts", name="reference", priority=0)
def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_best: int = 2,
    added: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    scores = {"softmax": lambda: logits.softmax(-1), "sigmoid": logits.sigmoid}[scoring]()
    # The order of logits is that of scores, but has no ties by rounding.
    choice = scores + bias if bias is not None else logits if num_groups == 1 else scores
    if num_groups > 1:
        groups = choice.unflatten(-1, (num_groups, -1))
        of_groups = groups.topk(group_best).values.sum(-1)
        last = of_groups.sort(descending=True, stable=True).indices[:, top_groups:]
        excluded = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, last, True)
        choice = groups.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.sort(descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + added)
    return ids.int(), weights * scale


def clamped_swiglu_and_mul(x: Tensor, activation: ClampedSwiGLU) -> Tensor:
    """[T, 2 * I], the gates first -> [T, I]"""
    limit = activation.limit
    gate, up = x.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / (1 + (-activation.scale * gate).exp()) * (up + 1)).to(x.dtype)


@register("fused_moe", name="reference", priority=0)
def fused_moe(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    return weighted_sum(expert_outputs(x, expert_ids, experts), weights, x.dtype)


@register("expert_outputs", name="reference", priority=0)
def expert_outputs(x: Tensor, expert_ids: Tensor, experts: Experts) -> Tensor:
    activation = experts.activation
    activate = (
        partial(clamped_swiglu_and_mul, activation=activation)
        if isinstance(activation, ClampedSwiGLU)
        else ACTIVATIONS[activation]
    )
    returned = torch.zeros(*expert_ids.shape, x.shape[1], device=x.device)  # of each slot
    for expert in expert_ids.unique().tolist():
        tokens, slots = (expert_ids == expert).nonzero(as_tuple=True)
        inner = activate(experts.gate_up[expert](x[tokens]))
        down = experts.down[expert]
        returned[tokens, slots] = getattr(down, "logits", down)(inner).float()
    return returned


@register("weighted_sum", name="reference", priority=0)
def weighted_sum(returned: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(len(returned), returned.shape[2], device=returned.device)
    for slot in range(returned.shape[1]):
        total = fused(returned[:, slot], weights[:, slot, None], total)
    return total.to(dtype)


@register("count_experts", name="reference", priority=0)
def count_experts(ids: Tensor, slots: Tensor | None, counts: Tensor) -> None:
    if slots is not None:
        ids = ids[slots >= 0]
    counts += torch.bincount(ids.flatten(), minlength=len(counts))


@register("scale_by_expert", name="reference", priority=0)
def scale_by_expert(weights: Tensor, ids: Tensor, scales: Tensor) -> None:
    weights *= scales[ids.long()]


@register("add_gated", name="reference", priority=0)
def add_gated(x: Tensor, gate: Tensor, out: Tensor) -> None:
    out.copy_(out.float() + gate.sigmoid() * x.float())
