"""Makes the call that samples tokens, which the operation and multi-step runs share.

Must not know: who samples, models.
"""

from typing import Any

import torch
from torch import Tensor

from ...reference.sampling import no_filters
from .calls import F32, Op, Sample

# Columns are temperature, top_k, top_p, min_p, seeds and positions, as sample_tokens takes them.
Columns = tuple[Any, ...]


def sample_call(
    rows: int, logits: Tensor, columns: Columns, token_ids: Tensor
) -> tuple[Sample, list[Tensor]]:
    """Makes the call for `sample_tokens` of these columns, with token_ids as its result.

    Returns the call and the objects that must live until it has run, besides logits and token_ids.
    """
    temperature, top_k, top_p, min_p, seeds, positions = columns
    if top_k is None or top_p is None or min_p is None:
        top_k, top_p, min_p = no_filters(len(temperature), logits.device)
    contiguous = [
        column.contiguous()
        for column in (temperature, top_k.to(torch.int32), top_p, min_p, seeds, positions)
    ]
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    call = Sample(
        op=Op.SAMPLE,
        dtype=F32,
        rows=rows,
        logits=logits.data_ptr(),
        **{name: column.data_ptr() for name, column in zip(names, contiguous)},
        out=token_ids.data_ptr(),
        logits_row=logits.stride(0),
        vocab_size=logits.shape[1],
    )
    return call, contiguous
