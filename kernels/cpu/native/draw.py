"""The call that samples tokens, shared by the operation and by multi-step runs.

Must not know: who samples, models.
"""

import torch
from torch import Tensor

from ...reference.sampling import no_filters
from .calls import F32, Op, Sample


def sample_call(
    rows: int,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor,
) -> tuple[Sample, list[Tensor]]:
    """Makes the call for `sample_tokens` with these arguments and this result.

    Returns the call and the objects that must live until it has run, besides logits and token_ids.
    """
    top_k, top_p, min_p = (
        (top_k, top_p, min_p) if top_k is not None else no_filters(len(temperature), logits.device)
    )
    columns = [
        column.contiguous()
        for column in (temperature, top_k.to(torch.int32), top_p, min_p, seeds, positions)
    ]
    addresses = [column.data_ptr() for column in columns]
    return Sample(
        Op.SAMPLE,
        F32,
        rows,
        logits.data_ptr(),
        *addresses,
        token_ids.data_ptr(),
        logits.stride(0),
        logits.shape[1],
    ), columns
