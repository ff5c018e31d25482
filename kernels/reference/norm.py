"""Specifies RMS norms.

Must not know: speed.
"""

import torch
from torch import Tensor

from ..registry import register


@register("rms_norm", name="reference", priority=0)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalised.to(weight.dtype) * weight).to(x.dtype)


@register("fused_add_rms_norm", name="reference", priority=0)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    x.copy_(rms_norm(residual, weight, eps))
