"""Gathers of the native library: embeddings, the rows whose logits are needed, and logits of a part
of the vocabulary.

Must not know: models, requests.
"""

import torch
from torch import Tensor

from ...ops import ABSENT
from ...registry import register
from .calls import F32, Embedding, GatherRows, Ids, Op, Step
from .draft_calls import SpreadLogits
from .program import empty, num_rows, submit
from .tensors import DTYPES, PRIORITY, is_native


@register("embedding", name="native", predicate=is_native, priority=PRIORITY)
def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    is_short = token_ids.dtype == torch.int32
    out = empty(len(token_ids), table.shape[1], dtype=table.dtype)
    call = Embedding(
        Op.EMBEDDING,
        DTYPES[table.dtype],
        num_rows(token_ids),
        table.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        *table.shape,
        Ids.TOKEN_IDS if is_short else Ids.POSITIONS,  # the recorder knows token types
    )
    address = token_ids.data_ptr()
    submit(call, Step(token_ids=address) if is_short else Step(positions=address))
    return out


@register("gather_rows", name="native", predicate=is_native, priority=PRIORITY)
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    out = empty(len(indices), x.shape[1], dtype=x.dtype)
    call = GatherRows(
        Op.GATHER_ROWS,
        DTYPES[x.dtype],
        num_rows(indices),
        x.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        out.stride(0),
        x.shape[1],
    )
    submit(call, Step(logits_indices=indices.data_ptr()))
    return out


@register("spread_logits", name="native", predicate=is_native, priority=PRIORITY)
def spread_logits(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    out = empty(len(logits), vocab_size, dtype=torch.float32)
    call = SpreadLogits(
        Op.SPREAD_LOGITS,
        F32,
        num_rows(logits),
        logits.data_ptr(),
        token_ids.data_ptr(),
        out.data_ptr(),
        logits.stride(0),
        out.stride(0),
        len(token_ids),
        vocab_size,
        ABSENT,
    )
    submit(call)
    return out
