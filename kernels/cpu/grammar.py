"""Applies grammar masks on the CPU with one table look-up per byte, at the same speed for dense and
sparse masks.

Must not know: where masks come from.
"""

import numpy as np
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cpu

# [256, 8] fp32: for each byte of a mask, the upper bound on the logits of its eight tokens.
_CEILINGS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.inf),
    np.float32(-np.inf),
)


@register("apply_grammar_bitmask", name="cpu", predicate=is_cpu, priority=PRIORITY)
def apply_grammar_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    # Branches dominate the cost. With 152k tokens, boolean indexing takes 0.1 ms for a row, and 1.7
    # ms if every other token is allowed; this takes 0.06 ms.
    array, vocab_size = logits.numpy(), logits.shape[1]
    for mask_bytes, row in zip(bitmask.numpy().view(np.uint8), rows.tolist()):
        ceiling = np.take(_CEILINGS, mask_bytes, axis=0).reshape(-1)[:vocab_size]
        np.minimum(array[row], ceiling, out=array[row])
