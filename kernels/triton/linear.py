"""Products with weights on a GPU: cuBLAS, through torch. No kernel of ours.

Must not know: models, requests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cuda


class PackedLinear:
    """The weight stays as it is, which cuBLAS reads well: a tied embedding goes on reading its rows
    from the same memory.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight = weight  # [N, K]
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def logits(self, x: Tensor) -> Tensor:
        """[T, N] f32, written once: rounded to bf16 and widened again, a vocabulary of 152k would
        be written twice and read once more.
        """
        if x.dtype == torch.float32:
            return self(x)
        logits = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return logits if self.bias is None else logits.add_(self.bias)


@register("pack_linear", name="cublas", predicate=is_cuda, priority=PRIORITY)
def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return PackedLinear(weight, bias)
