"""Chooses tokens with all options in Triton: one launch changes rows of logits, and those of
sampling.py draw and compute log-probabilities.

Must not know: models, requests, what asks for a change.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..choice import LogitChanges
from ..registry import register
from .device import PRIORITY, is_cuda
from .logits import penalised
from .order import (
    CHUNK,
    first_of_row,
    is_last_of_row,
    order_of,
    row_counters,
    token_of,
    value_of,
)
from .sampling import Draw, Scores, choose

PAIRS = 512  # edits or penalties of a row that a program looks through at once


@triton.jit
def change_kernel(
    logits_ptr,
    largest_ptr,
    raw_ptr,
    rows_ptr,
    raw_rows_ptr,
    mask_rows_ptr,
    bitmask_ptr,
    edit_starts_ptr,
    edit_tokens_ptr,
    edit_values_ptr,
    penalty_starts_ptr,
    penalty_tokens_ptr,
    penalty_counts_ptr,
    penalties_ptr,
    parts_ptr,
    has_nan_ptr,
    peaks_ptr,
    counters_ptr,
    vocab_size,
    num_words,
    num_chunks,
    row_stride,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (changed rows, chunks). A program looks through all edits and penalties of its row, and
    applies those of its chunk. A mask comes last, which gives the same logits: a masked one is
    -inf, whatever is added to it. parts and has_nan [changed rows, chunks]: the order of each
    chunk's first token i64, and whether it has a NaN i32. Fused multiply-adds are disabled.
    """
    change, chunk = tl.program_id(0), tl.program_id(1)
    row, start = tl.load(rows_ptr + change), chunk * CHUNK
    row_ptr = logits_ptr + row * row_stride
    token = start + tl.arange(0, CHUNK)
    is_token = token < vocab_size
    raw_row = tl.load(raw_rows_ptr + change)
    if raw_row >= 0:
        raw = tl.load(row_ptr + token, mask=is_token)
        tl.store(raw_ptr + raw_row * vocab_size + token, raw, mask=is_token)
        tl.debug_barrier()
    stop = tl.load(edit_starts_ptr + change + 1)
    for first in range(tl.load(edit_starts_ptr + change), stop, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        edited = tl.load(edit_tokens_ptr + pair, mask=pair < stop, other=-1)
        is_mine = (edited >= start) & (edited < start + CHUNK)
        value = tl.load(row_ptr + edited, mask=is_mine, other=0.0)
        value += tl.load(edit_values_ptr + pair, mask=is_mine, other=0.0)
        tl.store(row_ptr + edited, value, mask=is_mine)
    tl.debug_barrier()
    stop = tl.load(penalty_starts_ptr + change + 1)
    repetition = tl.load(penalties_ptr + change * 3)
    frequency = tl.load(penalties_ptr + change * 3 + 1)
    presence = tl.load(penalties_ptr + change * 3 + 2)
    for first in range(tl.load(penalty_starts_ptr + change), stop, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        seen = tl.load(penalty_tokens_ptr + pair, mask=pair < stop, other=-1)
        is_mine = (seen >= start) & (seen < start + CHUNK)
        count = tl.load(penalty_counts_ptr + pair, mask=is_mine, other=0)
        value = tl.load(row_ptr + seen, mask=is_mine, other=0.0)
        value = penalised(value, count, repetition, frequency, presence)
        tl.store(row_ptr + seen, value, mask=is_mine)
    tl.debug_barrier()
    x = tl.load(row_ptr + token, mask=is_token, other=float("-inf"))
    mask_row = tl.load(mask_rows_ptr + change)
    if mask_row >= 0:
        words = tl.load(bitmask_ptr + mask_row * num_words + token // 32, mask=is_token, other=-1)
        is_masked = ((words >> (token % 32)) & 1) == 0
        x = tl.where(is_masked, float("-inf"), x)
        tl.store(row_ptr + token, x, mask=is_token & is_masked)
    part = change * num_chunks + chunk
    tl.store(parts_ptr + part, tl.max(order_of(tl.where(x == x, x, float("-inf")), token), axis=0))
    tl.store(has_nan_ptr + part, tl.max((x != x).to(tl.int32), axis=0))
    if is_last_of_row(counters_ptr, change):
        largest = first_of_row(parts_ptr, change, num_chunks, BLOCK)
        other = tl.arange(0, BLOCK)
        has_nan = tl.load(
            has_nan_ptr + change * num_chunks + other,
            mask=other < num_chunks,
            other=0,
            cache_modifier=".cg",
        )
        is_nan = tl.max(has_nan, axis=0) > 0
        tl.store(largest_ptr + row, token_of(largest))
        tl.store(peaks_ptr + change, tl.where(is_nan, float("nan"), value_of(largest)))


@register("change_logits", name="triton", predicate=is_cuda, priority=PRIORITY)
def change_logits(logits: Tensor, largest: Tensor, raw: Tensor, changes: LogitChanges) -> Tensor:
    num_changed, vocab_size = len(changes.rows), logits.shape[1]
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    peaks = torch.empty(num_changed, device=logits.device)
    if num_changed:
        parts = torch.empty(num_changed, num_chunks, dtype=torch.int64, device=logits.device)
        has_nan = torch.empty(num_changed, num_chunks, dtype=torch.int32, device=logits.device)
        change_kernel[num_changed, num_chunks](
            *(logits, largest, raw, *changes, parts, has_nan, peaks, row_counters(peaks)),
            *(vocab_size, changes.bitmask.shape[1], num_chunks, logits.stride(0)),
            CHUNK=CHUNK,
            PAIRS=PAIRS,
            BLOCK=triton.next_power_of_2(num_chunks),
            enable_fp_fusion=False,
        )
    return peaks


@register("choose_tokens", name="triton", predicate=is_cuda, priority=PRIORITY)
def choose_tokens(
    logits: Tensor,
    largest: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    raw: Tensor,
    raw_rows: Tensor,
    k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, device = len(logits), logits.device
    ids = torch.empty(num_rows, k + 1, dtype=torch.int32, device=device)
    logprobs = torch.empty(num_rows, k + 1, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
    draw = None
    if temperature is not None and seeds is not None and positions is not None:
        draw = Draw(temperature, top_k, top_p, min_p, seeds, positions)
    scores = Scores(raw, raw_rows, k, ids, logprobs, ranks)
    return choose(logits, largest, draw, scores)[0], ids, logprobs, ranks
