"""Changes logits in place in Triton, by penalties and by a grammar's mask.

Must not know: models, requests, the draw.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cuda

# A program handles so many pairs. Their logits are scattered, so many programs keep more loads in
# flight.
PAIRS = 256
WORDS = 128  # words of a bitmask's row per program


@triton.jit
def penalised(value, count, repetition, frequency, presence):
    """Each step is rounded as in the reference if fused multiply-adds are disabled."""
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value -= frequency * count.to(tl.float32)
    return value - tl.where(count > 0, presence, 0.0)


@triton.jit(do_not_specialize=["num_pairs"])
def apply_penalties_kernel(
    logits_ptr,
    rows_ptr,
    token_ids_ptr,
    counts_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    num_pairs,
    row_stride,
    PAIRS: tl.constexpr,
):
    """Fused multiply-adds are disabled."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mask = pair < num_pairs
    logits_ptrs = (
        logits_ptr
        + tl.load(rows_ptr + pair, mask=mask, other=0) * row_stride
        + tl.load(token_ids_ptr + pair, mask=mask, other=0)
    )
    value = tl.load(logits_ptrs, mask=mask, other=0.0)
    repetition = tl.load(repetition_ptr + pair, mask=mask, other=1.0)
    count = tl.load(counts_ptr + pair, mask=mask, other=0)
    frequency = tl.load(frequency_ptr + pair, mask=mask, other=0.0)
    presence = tl.load(presence_ptr + pair, mask=mask, other=0.0)
    value = penalised(value, count, repetition, frequency, presence)
    tl.store(logits_ptrs, value, mask=mask)


@register("apply_penalties", name="triton", predicate=is_cuda, priority=PRIORITY)
def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    columns = [
        column.contiguous() for column in (rows, token_ids, counts, repetition, frequency, presence)
    ]
    if len(rows):
        grid = (triton.cdiv(len(rows), PAIRS),)
        apply_penalties_kernel[grid](
            logits, *columns, len(rows), logits.stride(0), PAIRS=PAIRS, enable_fp_fusion=False
        )


@triton.jit
def apply_grammar_bitmask_kernel(
    logits_ptr, bitmask_ptr, rows_ptr, vocab_size, num_words, row_stride, WORDS: tl.constexpr
):
    """Writes only the masked logits and reads none."""
    grammar = tl.program_id(0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    words = tl.load(
        bitmask_ptr + grammar.to(tl.int64) * num_words + word, mask=word < num_words, other=0
    )
    token = word[:, None] * 32 + bit[None, :]
    is_masked = ((words[:, None] >> bit[None, :]) & 1) == 0
    masked = tl.full([WORDS, 32], float("-inf"), tl.float32)
    tl.store(
        logits_ptr + tl.load(rows_ptr + grammar) * row_stride + token,
        masked,
        mask=is_masked & (token < vocab_size),
    )


@register("apply_grammar_bitmask", name="triton", predicate=is_cuda, priority=PRIORITY)
def apply_grammar_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    num_rows, num_words = bitmask.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(num_words, WORDS))
        apply_grammar_bitmask_kernel[grid](
            logits,
            bitmask,
            rows.contiguous(),
            logits.shape[1],
            num_words,
            logits.stride(0),
            WORDS=WORDS,
        )
