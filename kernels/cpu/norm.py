"""RMS norms on the CPU.

Must not know: models, requests.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cpu

# F.rms_norm computes in fp32, in one call from Python. With the weight it would multiply before
# rounding to dtype, unlike the contract; without the weight it rounds first.


@register("rms_norm", name="cpu", predicate=is_cpu, priority=PRIORITY)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, None, eps).mul_(weight)


@register("fused_add_rms_norm", name="cpu", predicate=is_cpu, priority=PRIORITY)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    torch.mul(F.rms_norm(residual, weight.shape, None, eps), weight, out=x)
