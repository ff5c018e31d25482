"""Implements RMS norms on the CPU.

Must not know: models, requests.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cpu

# F.rms_norm computes in fp32, in one call from Python. With the weight it multiplies before it
# rounds to dtype, as the contract says for an fp32 weight; without the weight it rounds first.


@register("rms_norm", name="cpu", predicate=is_cpu, priority=PRIORITY)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, None, eps).mul_(weight)


@register("fused_add_rms_norm", name="cpu", predicate=is_cpu, priority=PRIORITY)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    if weight.dtype != x.dtype:
        x.copy_(rms_norm(residual, weight, eps))
    else:
        torch.mul(F.rms_norm(residual, weight.shape, None, eps), weight, out=x)
