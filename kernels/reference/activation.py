"""Specifies gated activations, scaling and adding.

Must not know: speed.
"""

import torch.nn.functional as F
from torch import Tensor

from ..registry import register


@register("silu_and_mul", name="reference", priority=0)
def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    return (wide * wide.sigmoid()).to(x.dtype) * up


@register("gelu_tanh_and_mul", name="reference", priority=0)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate.float(), approximate="tanh").to(x.dtype) * up


@register("soft_cap", name="reference", priority=0)
def soft_cap(logits: Tensor, cap: float) -> None:
    logits.div_(cap).tanh_().mul_(cap)


@register("scale", name="reference", priority=0)
def scale(x: Tensor, factor: float) -> None:
    x.copy_(x.float() * factor)


@register("add", name="reference", priority=0)
def add(x: Tensor, residual: Tensor) -> None:
    residual.add_(x)
