"""Specifies linear layers, row gathers, and logits of a part of the vocabulary.

Must not know: speed.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..ops import ABSENT
from ..registry import register


@register("embedding", name="reference", priority=0)
def embedding(token_ids: Tensor, table: Tensor, first_if_absent: bool = False) -> Tensor:
    rows = token_ids.long()
    return table[rows * (rows < len(table)) if first_if_absent else rows]


@register("gather_rows", name="reference", priority=0)
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices]


@register("spread_logits", name="reference", priority=0)
def spread_logits(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    out = logits.new_full((len(logits), vocab_size), ABSENT)
    out[:, token_ids.long()] = logits
    return out


@register("pack_linear", name="reference", priority=0)
def pack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, weight, bias)
