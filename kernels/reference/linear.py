"""Specification of linear layers and row gathers.

Must not know: speed.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..registry import register


@register("embedding", name="reference", priority=0)
def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    return table[token_ids.long()]


@register("gather_rows", name="reference", priority=0)
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices]


@register("pack_linear", name="reference", priority=0)
def pack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, weight, bias)
