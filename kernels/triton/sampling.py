"""Finds the largest logit of a row, and draws a token, in Triton. It does not sort and does not
wait. A row's token depends on the row alone.

Must not know: models, requests, how top_k and top_p are applied.
"""

# pyright: reportPossiblyUnboundVariable=false
# (branches on constexpr are Triton's)

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cuda
from .noise import gumbel, uniform
from .order import (
    CHUNK,
    TILE,
    first_of_chunk_kernel,
    first_of_row,
    first_token_kernel,
    load_logits,
    order_of,
    value_of,
)
from .top_k_top_p import GREEDY_BELOW, find_last_kept, least_scaled, scale


@triton.jit
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    last_kept_ptr,
    parts_ptr,
    drawn_ptr,
    vocab_size,
    num_chunks,
    row_stride,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """drawn [rows, chunks] i64: the order of the chunk's token with the largest scaled + noise, or,
    in a greedy row, with the largest logit. FILTERED: only tokens that min_p keeps and that are not
    after last_kept are considered.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    best = tl.load(parts_ptr + row * num_chunks + chunk)
    if temperature >= GREEDY_BELOW:
        largest = value_of(first_of_row(parts_ptr, row, num_chunks, BLOCK))
        if FILTERED:
            least, last = least_scaled(tl.load(min_p_ptr + row)), tl.load(last_kept_ptr + row)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        best = order_of(tl.full([], float("-inf"), tl.float32), chunk * CHUNK)
        for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab_size), TILE):
            token = start + tl.arange(0, TILE)
            x = load_logits(logits_ptr + row.to(tl.int64) * row_stride, token, vocab_size)
            scaled = scale(x, largest, temperature)
            is_kept = token < vocab_size
            if FILTERED:
                is_kept = is_kept & (scaled.to(tl.float64) >= least) & (order_of(x, token) >= last)
            if tl.max(is_kept.to(tl.int32), axis=0) > 0:
                score = tl.where(
                    is_kept, scaled + gumbel(uniform(start, seed, position, TILE)), float("-inf")
                )
                best = tl.maximum(best, tl.max(order_of(score, token), axis=0))
    tl.store(drawn_ptr + row * num_chunks + chunk, best)


def first_of_chunks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """For each row and chunk: the order of its first token i64, and whether all its logits are
    finite i32.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    parts = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    first_of_chunk_kernel[num_rows, num_chunks](
        logits, parts, finite, vocab_size, logits.stride(0), CHUNK=CHUNK
    )
    return parts, finite


@register("argmax", name="triton", predicate=is_cuda, priority=PRIORITY)
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    is_finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    if len(logits):
        parts, finite = first_of_chunks(logits)
        num_chunks = parts.shape[1]
        block = triton.next_power_of_2(num_chunks)
        first_token_kernel[(len(logits),)](
            parts, finite, token_ids, is_finite, num_chunks, BLOCK=block, FINITE=True, num_warps=1
        )
    return token_ids, is_finite


@register("sample_tokens", name="triton", predicate=is_cuda, priority=PRIORITY)
def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return token_ids
    temperature = temperature.contiguous()
    seeds = seeds.contiguous()
    positions = positions.contiguous()
    parts, finite = first_of_chunks(logits)
    is_filtered = False
    last_kept, least = temperature, temperature  # the kernel does not read them
    if top_k is not None and top_p is not None and min_p is not None:
        is_filtered, least = True, min_p.contiguous()
        last_kept = find_last_kept(
            logits, temperature, top_k.contiguous(), top_p.contiguous(), least, parts
        )
    num_chunks, drawn = parts.shape[1], torch.empty_like(parts)
    block = triton.next_power_of_2(num_chunks)
    columns = temperature, least, seeds, positions, last_kept
    draw_kernel[num_rows, num_chunks](
        logits,
        *columns,
        parts,
        drawn,
        vocab_size,
        num_chunks,
        logits.stride(0),
        CHUNK=CHUNK,
        TILE=TILE,
        BLOCK=block,
        FILTERED=is_filtered,
        enable_fp_fusion=False,
    )
    first_token_kernel[(num_rows,)](
        drawn, finite, token_ids, token_ids, num_chunks, BLOCK=block, FINITE=False, num_warps=1
    )
    return token_ids
