"""Specifies grammar masks.

Must not know: speed, where masks come from.
"""

import torch
from torch import Tensor

from ..registry import register


@register("apply_grammar_bitmask", name="reference", priority=0)
def apply_grammar_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    for words, row in zip(bitmask, rows.tolist()):
        is_allowed = (words[token_ids // 32] >> (token_ids % 32) & 1).bool()
        logits[row, ~is_allowed] = float("-inf")
