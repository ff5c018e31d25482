"""Implements argmax, sampling and log-probabilities by the native library.

Must not know: models, requests.
"""

import torch
from torch import Tensor

from ...registry import register
from .calls import Argmax, GatherLogprobs, Op
from .draw import sample_call
from .program import empty, num_rows, run_call, submit
from .tensors import PRIORITY, is_native


@register("argmax", name="native", predicate=is_native, priority=PRIORITY)
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    count, vocab_size = logits.shape
    token_ids, is_finite = empty(count, dtype=torch.int64), empty(count, dtype=torch.bool)
    run_call(
        Argmax,
        Op.ARGMAX,
        logits,
        logits=logits,
        out=token_ids,
        is_finite=is_finite,
        vocab_size=vocab_size,
    )
    return token_ids, is_finite


@register("sample_tokens", name="native", predicate=is_native, priority=PRIORITY)
def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    largest: Tensor | None = None,
) -> Tensor:
    token_ids = empty(len(logits), dtype=torch.int64)
    columns = temperature, top_k, top_p, min_p, seeds, positions
    call, _kept = sample_call(num_rows(logits), logits, columns, token_ids)
    submit(call)
    return token_ids


@register("gather_logprobs", name="native", predicate=is_native, priority=PRIORITY)
def gather_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    count, vocab_size = logits.shape
    ids, logprobs = empty(count, k + 1, dtype=torch.int32), empty(count, k + 1, dtype=torch.float32)
    ranks, token_ids = empty(count, dtype=torch.int32), token_ids.contiguous()
    run_call(
        GatherLogprobs,
        Op.GATHER_LOGPROBS,
        logits,
        logits=logits,
        token_ids=token_ids,
        ids=ids,
        logprobs=logprobs,
        ranks=ranks,
        vocab_size=vocab_size,
        k=k,
    )
    return ids, logprobs, ranks
