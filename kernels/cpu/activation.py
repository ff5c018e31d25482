"""Implements gated activations, scaling and adding on the CPU.

Must not know: models, requests.
"""

import torch.nn.functional as F
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cpu


@register("silu_and_mul", name="cpu", predicate=is_cpu, priority=PRIORITY)
def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@register("gelu_tanh_and_mul", name="cpu", predicate=is_cpu, priority=PRIORITY)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@register("scale", name="cpu", predicate=is_cpu, priority=PRIORITY)
def scale(x: Tensor, factor: float) -> None:
    x.mul_(factor)


@register("add", name="cpu", predicate=is_cpu, priority=PRIORITY)
def add(x: Tensor, residual: Tensor) -> None:
    residual.add_(x)
