"""Gathers embeddings and the rows whose logits are needed, and spreads logits of a part of the
vocabulary, by the native library.

Must not know: models, requests.
"""

import torch
from torch import Tensor

from ...ops import ABSENT
from ...registry import register
from .calls import Absent, Embedding, GatherRows, Ids, Op, SpreadLogits, Step
from .program import empty, run_call
from .tensors import DTYPES, PRIORITY, is_native


@register("embedding", name="native", predicate=is_native, priority=PRIORITY)
def embedding(token_ids: Tensor, table: Tensor, first_if_absent: bool = False) -> Tensor:
    is_short = token_ids.dtype == torch.int32
    out = empty(len(token_ids), table.shape[1], dtype=table.dtype)
    address = token_ids.data_ptr()
    run_call(
        Embedding,
        Op.EMBEDDING,
        token_ids,
        Step(token_ids=address) if is_short else Step(positions=address),
        dtype=DTYPES[table.dtype],
        table=table,
        out=out,
        num_ids=table.shape[0],
        size=table.shape[1],
        ids=Ids.TOKEN_IDS if is_short else Ids.POSITIONS,  # the recorder knows token types
        first_id=0,  # the recorder knows parts of a table
        absent=Absent.ABSENT_FIRST if first_if_absent else Absent.ABSENT_NAN,
    )
    return out


@register("gather_rows", name="native", predicate=is_native, priority=PRIORITY)
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    out = empty(len(indices), x.shape[1], dtype=x.dtype)
    run_call(
        GatherRows,
        Op.GATHER_ROWS,
        indices,
        Step(logits_indices=indices.data_ptr()),
        dtype=DTYPES[x.dtype],
        x=x,
        out=out,
        size=x.shape[1],
    )
    return out


@register("spread_logits", name="native", predicate=is_native, priority=PRIORITY)
def spread_logits(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    out = empty(len(logits), vocab_size, dtype=torch.float32)
    run_call(
        SpreadLogits,
        Op.SPREAD_LOGITS,
        logits,
        x=logits,
        token_ids=token_ids,
        out=out,
        size=len(token_ids),
        vocab_size=vocab_size,
        absent=ABSENT,
    )
    return out
