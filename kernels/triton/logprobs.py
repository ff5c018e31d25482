"""Computes log-probabilities in Triton, of the chosen token with its rank, and of the most likely
tokens. The row is read once.

Must not know: models, requests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..choice import MOST_LOGPROBS
from ..registry import register
from .device import PRIORITY, is_cuda
from .order import CHUNK, LOWEST, load_logits, order_of, token_of, value_of


@triton.jit
def score_chunk(
    x,
    row_part,
    chunk,
    parts_ptr,
    sums_ptr,
    tops_ptr,
    k,
    CHUNK: tl.constexpr,
):
    """Writes for a chunk x [CHUNK] f32 of a row, whose first chunk is `row_part` in [rows, chunks]:
    the order of its first token i64, the sum of exp(logit - its largest) f32, and the orders of its
    first k tokens [rows, chunks, k] i64.
    """
    part = row_part + chunk
    order = order_of(x, chunk * CHUNK + tl.arange(0, CHUNK))
    first = tl.max(order, axis=0)
    largest = value_of(first)
    exps = tl.exp(x - tl.where(largest > float("-inf"), largest, 0.0))
    tl.store(parts_ptr + part, first)
    tl.store(sums_ptr + part, tl.sum(exps, axis=0))
    for i in range(k):
        tl.store(tops_ptr + part.to(tl.int64) * k + i, first)
        order = tl.where(order == first, LOWEST, order)
        first = tl.max(order, axis=0)


@triton.jit
def log_denominator(parts_ptr, sums_ptr, row, num_chunks, BLOCK: tl.constexpr):
    """-> the row's largest logit and the logarithm of the sum of exp(logit - largest)."""
    chunk = tl.arange(0, BLOCK)
    mask = chunk < num_chunks
    place = row * num_chunks + chunk
    parts = tl.load(parts_ptr + place, mask=mask, other=LOWEST, cache_modifier=".cg")
    sums = tl.load(sums_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
    largest, chunk_largest = value_of(tl.max(parts, axis=0)), value_of(parts)
    is_counted = mask & (chunk_largest > float("-inf"))
    total = tl.sum(tl.where(is_counted, sums * tl.exp(chunk_largest - largest), 0.0), axis=0)
    return largest, tl.log(total)


@triton.jit
def store_logprobs(
    x,
    chosen,
    norms,
    tops_ptr,
    ids_ptr,
    logprobs_ptr,
    num_tops,
    k,
    TOPS: tl.constexpr,
):
    """Writes ids i32 and logprobs f32 of the chosen token, whose logit is x, and of the first k of
    the row's num_tops orders. Returns how many of them are more likely than the chosen token i32,
    and the logit of the last of them.
    """
    largest, total = norms
    tl.store(ids_ptr, chosen.to(tl.int32))
    tl.store(logprobs_ptr, x - largest - total)
    above, last = tl.full([], 0, tl.int32), largest
    if k > 0:
        place = tl.arange(0, TOPS)
        tops = tl.load(tops_ptr + place, mask=place < num_tops, other=LOWEST, cache_modifier=".cg")
        for i in range(k):
            first = tl.max(tops, axis=0)
            last = value_of(first)
            above += (last > x).to(tl.int32)
            tl.store(ids_ptr + 1 + i, token_of(first).to(tl.int32))
            tl.store(logprobs_ptr + 1 + i, last - largest - total)
            tops = tl.where(tops == first, LOWEST, tops)
    return above, last


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
    """Writes for each chunk [rows, chunks] what score_chunk says, and the number of logits above
    the chosen one i32.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    row_part = row * tl.num_programs(1)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    x = load_logits(row_ptr, chunk * CHUNK + tl.arange(0, CHUNK), vocab_size)
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row))
    tl.store(likelier_ptr + row_part + chunk, tl.sum((x > chosen).to(tl.int32), axis=0))
    score_chunk(x, row_part, chunk, parts_ptr, sums_ptr, tops_ptr, k, CHUNK)


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
    norms = log_denominator(parts_ptr, sums_ptr, row, num_chunks, BLOCK)
    tl.store(norms_ptr + 2 * row, norms[0])
    tl.store(norms_ptr + 2 * row + 1, norms[1])
    chosen = tl.load(token_ids_ptr + row)
    store_logprobs(
        tl.load(logits_ptr + row.to(tl.int64) * row_stride + chosen),
        chosen,
        norms,
        tops_ptr + row.to(tl.int64) * num_chunks * k,
        ids_ptr + row.to(tl.int64) * num_out,
        logprobs_ptr + row.to(tl.int64) * num_out,
        num_chunks * k,
        k,
        TOPS,
    )
    chunk = tl.arange(0, BLOCK)
    likelier = tl.load(likelier_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
    tl.store(ranks_ptr + row, 1 + tl.sum(likelier, axis=0))


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
    token_ids, turns = token_ids.contiguous(), k if k <= MOST_LOGPROBS else 0
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
    if turns < k:  # torch.topk also sorts only the tokens that it returns
        values, ids[:, 1:] = logits.topk(k, dim=-1)
        logprobs[:, 1:] = values - norms[:, :1] - norms[:, 1:]
    return ids, logprobs, ranks
