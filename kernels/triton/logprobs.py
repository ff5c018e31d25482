"""Computes log-probabilities in Triton, of the chosen token with its rank, and of the most likely
tokens. The row is read once.

Must not know: models, requests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cuda
from .order import CHUNK, LOWEST, first_of_row, load_logits, order_of, token_of, value_of

# At most so many likely tokens are found one after the other. For more, torch.topk is used, which
# also sorts only the tokens that it returns.
MOST_BY_TURNS = 32


@triton.jit(do_not_specialize=["k"])
def chunk_logprobs_kernel(
    logits_ptr,
    token_ids_ptr,
    parts_ptr,
    sums_ptr,
    likelier_ptr,
    tops_ptr,
    vocab_size,
    row_stride,
    k,
    CHUNK: tl.constexpr,
):
    """Writes for each chunk [rows, chunks]: the order of its first token i64, the sum of exp(logit
    - its largest) f32, the number of logits above the chosen one i32, and the orders of its first k
    tokens [rows, chunks, k] i64.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    part = row * tl.num_programs(1) + chunk
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    x = load_logits(row_ptr, token, vocab_size)
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row))
    order = order_of(x, token)
    first = tl.max(order, axis=0)
    largest = value_of(first)
    exps = tl.exp(x - tl.where(largest > float("-inf"), largest, 0.0))
    tl.store(parts_ptr + part, first)
    tl.store(sums_ptr + part, tl.sum(exps, axis=0))
    tl.store(likelier_ptr + part, tl.sum((x > chosen).to(tl.int32), axis=0))
    for i in range(k):
        tl.store(tops_ptr + part.to(tl.int64) * k + i, first)
        order = tl.where(order == first, LOWEST, order)
        first = tl.max(order, axis=0)


@triton.jit(do_not_specialize=["k", "num_out"])
def row_logprobs_kernel(
    logits_ptr,
    token_ids_ptr,
    parts_ptr,
    sums_ptr,
    likelier_ptr,
    tops_ptr,
    ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    norms_ptr,
    row_stride,
    num_chunks,
    k,
    num_out,
    BLOCK: tl.constexpr,
    TOPS: tl.constexpr,
):
    """ids i32 and logprobs f32 [rows, num_out]: the chosen token and k others; ranks [rows] i32;
    norms [rows, 2] f32, whose sum is the logarithm of the softmax's denominator.
    """
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    mask = chunk < num_chunks
    largest = value_of(first_of_row(parts_ptr, row, num_chunks, BLOCK))
    chunk_largest = value_of(tl.load(parts_ptr + row * num_chunks + chunk, mask=mask, other=LOWEST))
    sums = tl.load(sums_ptr + row * num_chunks + chunk, mask=mask, other=0.0)
    total = tl.log(
        tl.sum(
            tl.where(
                mask & (chunk_largest > float("-inf")), sums * tl.exp(chunk_largest - largest), 0.0
            ),
            axis=0,
        )
    )
    chosen = tl.load(token_ids_ptr + row)
    ids_ptr += row.to(tl.int64) * num_out
    logprobs_ptr += row.to(tl.int64) * num_out
    tl.store(norms_ptr + 2 * row, largest)
    tl.store(norms_ptr + 2 * row + 1, total)
    tl.store(ids_ptr, chosen.to(tl.int32))
    tl.store(
        logprobs_ptr, tl.load(logits_ptr + row.to(tl.int64) * row_stride + chosen) - largest - total
    )
    tl.store(
        ranks_ptr + row,
        1 + tl.sum(tl.load(likelier_ptr + row * num_chunks + chunk, mask=mask, other=0), axis=0),
    )
    if k > 0:
        place = tl.arange(0, TOPS)
        tops = tl.load(
            tops_ptr + row.to(tl.int64) * num_chunks * k + place,
            mask=place < num_chunks * k,
            other=LOWEST,
        )
        for i in range(k):
            first = tl.max(tops, axis=0)
            tl.store(ids_ptr + 1 + i, token_of(first).to(tl.int32))
            tl.store(logprobs_ptr + 1 + i, value_of(first) - largest - total)
            tops = tl.where(tops == first, LOWEST, tops)


@register("gather_logprobs", name="triton", predicate=is_cuda, priority=PRIORITY)
def gather_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    ids = empty(torch.int32, k + 1)
    logprobs = empty(torch.float32, k + 1)
    ranks = empty(torch.int32)
    norms = empty(torch.float32, 2)
    if not num_rows:
        return ids, logprobs, ranks
    token_ids, turns = token_ids.contiguous(), k if k <= MOST_BY_TURNS else 0
    found = [empty(dtype, num_chunks) for dtype in (torch.int64, torch.float32, torch.int32)]
    found.append(empty(torch.int64, num_chunks, max(turns, 1)))
    chunk_logprobs_kernel[num_rows, num_chunks](
        logits, token_ids, *found, vocab_size, logits.stride(0), turns, CHUNK=CHUNK
    )
    blocks = {
        "BLOCK": triton.next_power_of_2(num_chunks),
        "TOPS": triton.next_power_of_2(max(turns, 1) * num_chunks),
    }
    out = ids, logprobs, ranks, norms
    row_logprobs_kernel[(num_rows,)](
        logits, token_ids, *found, *out, logits.stride(0), num_chunks, turns, k + 1, **blocks
    )
    if turns < k:
        values, ids[:, 1:] = logits.topk(k, dim=-1)
        logprobs[:, 1:] = values - norms[:, :1] - norms[:, 1:]
    return ids, logprobs, ranks
