"""Multiplies by weights on a GPU with cuBLAS, through torch. Few rows in a CUDA graph are
multiplied together with the operations around the product (few_rows.py).

Must not know: models, requests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import register
from . import few_rows
from .device import PRIORITY, is_cuda

# cuBLAS may divide a long sum among programs. What they have is added in fp32, as in one program.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

# For other numbers of outputs in 16 bits cuBLAS has kernels that round a sum before they add the
# bias. The contract has one rounding.
ALIGNED = 8


class PackedLinear:
    """Keeps the weight's layout, which suits cuBLAS. A tied embedding reads the same memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight = weight  # [N, K]
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.weight) % ALIGNED and x.dtype != torch.float32:
            return self.logits(x).to(x.dtype)
        return F.linear(x, self.weight, self.bias)

    def logits(self, x: Tensor) -> Tensor:
        """[T, N] f32, written directly. Rounding to bf16 and widening afterwards would write the
        logits twice and read them once more.
        """
        if x.dtype == torch.float32:
            return self(x)
        logits = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return logits if self.bias is None else logits.add_(self.bias)

    def fuses(self, num_rows: int) -> bool:
        """Whether `fused` computes so many rows faster than the operations one by one."""
        return few_rows.is_for_few_rows(num_rows, self.weight)

    def fused(
        self,
        x: Tensor,
        norm: tuple[Tensor, float] | None = None,
        gate: str = "",
        residual: Tensor | None = None,
    ) -> Tensor:
        """See few_rows.multiply."""
        return few_rows.multiply(x, self.weight, self.bias, norm, gate, residual)


@register("pack_linear", name="cublas", predicate=is_cuda, priority=PRIORITY)
def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return PackedLinear(weight, bias)
