"""Expresses the order of a row's tokens, by logit and then by ascending token id, as integers, and
finds the first token of a row with several programs.

Must not know: what the order is used for.

A row is read in chunks of CHUNK tokens by as many programs, so that a single row of a large
vocabulary keeps many multiprocessors busy. A row's division depends on its size alone. Programs'
results are combined only by adding integers or taking a maximum, so the bits of a result depend on
the row alone.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # tokens per program
TILE = 1024  # tokens at a time, where more than the logits has to be in registers

LOWEST, HIGHEST = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
NO_SIGN = tl.constexpr(2**31 - 1)


@triton.jit
def load_logits(row_ptr, token, vocab_size):
    """[SIZE] f32 at `token` [SIZE].

    A NaN counts as -inf, as do tokens beyond the vocabulary.
    """
    x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def load_logit(row_ptr, token):
    """One of a row, as load_logits reads it."""
    x = tl.load(row_ptr + token)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def order_of(x, token):
    """-> i64, larger for an earlier token: x as an integer of the same order in the upper half, the
    token id in the lower. -0 equals 0.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & NO_SIGN)).to(tl.int64) << 32) | (token ^ NO_SIGN).to(tl.int64)


@triton.jit
def token_of(order):
    return (order & NO_SIGN) ^ NO_SIGN


@triton.jit
def value_of(order):
    bits = (order >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & NO_SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def first_of_row(parts_ptr, row, num_chunks, BLOCK: tl.constexpr):
    """Returns the order of a row's first token. parts [rows, num_chunks] i64: the orders of the
    chunks' first tokens.
    """
    chunk = tl.arange(0, BLOCK)
    mask = chunk < num_chunks
    parts = tl.load(
        parts_ptr + row * num_chunks + chunk, mask=mask, other=LOWEST, cache_modifier=".cg"
    )
    return tl.max(parts, axis=0)


@triton.jit
def is_last_of_row(counters_ptr, row):
    """Whether all other programs (row, chunk) of the launch have come here: the one that does last
    reads what they have stored before, around its own cache (.cg; see attention_decode). The
    counter is 0 before the launch and after it.
    """
    tl.debug_barrier()
    count = tl.atomic_add(counters_ptr + row, 1, sem="acq_rel", scope="gpu")
    is_last = count == tl.num_programs(1) - 1
    if is_last:
        tl.store(counters_ptr + row, 0)
    return is_last


@functools.cache
def counters_of_rows(size: int, device: torch.device) -> Tensor:
    """[size] i32, 0 between launches, which share them: an engine's launches run in order."""
    return torch.zeros(size, dtype=torch.int32, device=device)


def row_counters(logits: Tensor) -> Tensor:
    """For is_last_of_row; the same for every step of so many rows, since graphs keep addresses."""
    return counters_of_rows(max(64, triton.next_power_of_2(len(logits))), logits.device)


@triton.jit
def first_token_kernel(
    logits_ptr,
    parts_ptr,
    finite_ptr,
    counters_ptr,
    token_ids_ptr,
    is_finite_ptr,
    vocab_size,
    num_chunks,
    row_stride,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """token_ids [rows] i64: each row's first token; is_finite [rows] bool: whether all its logits
    are finite. parts [rows, chunks] i64 and finite, same shape, i32, are the same of each chunk.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(
        logits_ptr + row.to(tl.int64) * row_stride + token,
        mask=token < vocab_size,
        other=float("-inf"),
    )
    part = row * num_chunks + chunk
    tl.store(parts_ptr + part, tl.max(order_of(tl.where(x == x, x, float("-inf")), token), axis=0))
    tl.store(
        finite_ptr + part,
        tl.min(((tl.abs(x) < float("inf")) | (token >= vocab_size)).to(tl.int32), axis=0),
    )
    if is_last_of_row(counters_ptr, row):
        tl.store(token_ids_ptr + row, token_of(first_of_row(parts_ptr, row, num_chunks, BLOCK)))
        other = tl.arange(0, BLOCK)
        finite = tl.load(
            finite_ptr + row * num_chunks + other,
            mask=other < num_chunks,
            other=1,
            cache_modifier=".cg",
        )
        tl.store(is_finite_ptr + row, tl.min(finite, axis=0) != 0)
