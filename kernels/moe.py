"""Declares the operations of mixtures of experts with their contracts, for ops.py.

Must not know: how an operation is implemented, models, requests.

T, H, "dtype": as in ops.py. E is the number of a layer's experts, K how many a token has, I their
inner size.
"""

# pyright: reportReturnType=false
# (a contract has no body)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .registry import operation

Multiply = Callable[[Tensor], Tensor]
UNGATED = ("relu_squared",)  # activations of experts without a gate


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The activation (up + 1) * gate * sigmoid(scale * gate), of a gate of at most `limit` and an
    up within +-limit (gpt-oss). Both are of dtype, the rest is in fp32.
    """

    scale: float
    limit: float


@dataclass(frozen=True, eq=False)
class Experts:
    """The packed weights of a layer's experts: what pack_linear, pack_quantized_linear or
    pack_gguf_linear return, for each expert.
    """

    gate_up: list[Multiply]  # [n, H] -> [n, 2 * I], or [n, I] for UNGATED activations
    down: list[Multiply]  # [n, I] -> [n, H]
    # The activations "silu" and "gelu_tanh" are those of ops.silu_and_mul and
    # ops.gelu_tanh_and_mul, "relu_squared" is ops.relu_squared.
    activation: str | ClampedSwiGLU
    # It holds values that an implementation derives once for later steps.
    scratch: dict[Any, Any] = field(default_factory=dict)


@operation
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
    """Chooses the experts of each token: logits [T, E] fp32 -> ids [T, K] i32, all different, and
    weights [T, K] fp32; K = top_k.

    A token's scores are softmax(logits) or sigmoid(logits), as `scoring` says. Its experts are
    those with the largest score + bias, in descending order, the lowest id first among equals; bias
    [E] fp32 counts for the choice alone (Wang et al. 2024). With num_groups > 1 the experts form
    groups of E / num_groups >= 2 neighbours, and only the top_groups groups take part whose
    group_best largest score + bias have the largest sum: 2 of them (DeepSeek-V3), or 1 (V2). The
    weights are the chosen scores, divided by their sum plus `added` if `renormalize`, times
    `scale`.

    Softmax with `renormalize` is also the softmax of the K largest logits (gpt-oss). A row with NaN
    gives arbitrary ids, all different, in [0, E); other rows are not affected.
    """


@operation
def fused_moe(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """x [T, H], expert_ids [T, K] i32, weights [T, K] fp32 -> [T, H]: the weighted sum of what a
    token's experts return.

    An expert returns down(activation(gate_up(x))) (Shazeer et al. 2017).
    The activation's result is rounded to dtype; down's is not. A token's sum is in fp32, in the
    order of its ids, with one fused multiply-add each, and is rounded once. So it does not depend
    on the other tokens, as far as the packed layers do not.
    """


@operation
def expert_outputs(x: Tensor, expert_ids: Tensor, experts: Experts) -> Tensor:
    """x [T, H], expert_ids [T, K] i32 -> [T, K, H] fp32: what a token's experts return.

    expert_outputs and weighted_sum are the two parts of fused_moe, for where these are computed in
    different places.
    """


@operation
def weighted_sum(returned: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """returned [T, K, H] fp32, weights [T, K] fp32 -> [T, H] of dtype: a token's sum over K, in
    order, as in fused_moe.
    """


@operation
def count_experts(ids: Tensor, slots: Tensor | None, counts: Tensor) -> None:
    """In place: counts [E] i64 += how many of ids [T, K] i32 name each expert; all in [0, E).

    slots [T] i64: a token with a negative slot is not counted. If slots is None, all tokens are.
    """


@operation
def scale_by_expert(weights: Tensor, ids: Tensor, scales: Tensor) -> None:
    """In place, weights [T, K] fp32 *= scales[ids]: ids [T, K] i32 in [0, E), scales [E] fp32, all
    contiguous (Gemma 4).
    """


@operation
def add_gated(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """In place, x and out [T, H], gate [T, 1] fp32: out += sigmoid(gate) * x in fp32, rounded to
    dtype.

    It is for an expert that all tokens share (Qwen2-MoE).
    """
