"""Computes how many bytes an operation moves and how many operations on numbers it does, from its
sizes.

Must not know: implementations, models, requests.

Weights are not part of it, since their size depends on how they are packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Work(NamedTuple):
    shape: str
    num_bytes: int = 0  # activations and KV cache, read and written
    flops: int = 0


def linear(rows: int, columns_in: int, columns_out: int, in_bytes: int, out_bytes: int) -> Work:
    """x [rows, columns_in] times a weight [columns_out, columns_in]. in_bytes and out_bytes are
    those of one number of x and of the result.
    """
    return Work(
        f"[{rows}, {columns_in}] · [{columns_out}, {columns_in}]ᵀ",
        rows * (columns_in * in_bytes + columns_out * out_bytes),
        2 * rows * columns_in * columns_out,
    )


def rows_of(rows: int, size: int, item_bytes: int, reads_and_writes: int) -> Work:
    """Returns the work of an operation on `rows` rows of `size` numbers; reads_and_writes counts
    its passes over them.
    """
    return Work(f"[{rows}, {size}]", rows * size * item_bytes * reads_and_writes, 0)


def attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    item_bytes: int,
    cache_bytes: int,
    window: int,
) -> Work:
    """Returns the work of causal attention over the KV cache. window: 0, or the positions that a
    token sees; cache_bytes: of one number of the cache.
    """
    num_tokens, pairs, keys = sum(query_lens), 0, 0
    for queries, length in zip(query_lens, seq_lens):
        first = length - queries + 1  # keys that the first query sees
        if window and first >= window:
            pairs += queries * window
        elif window and length > window:
            pairs += sum(min(window, n) for n in range(first, length + 1))
        else:
            pairs += queries * (first + length) // 2
        keys += min(length, window + queries - 1) if window else length
    return Work(
        f"[{num_tokens}, {heads}, {head_dim}] over {kv_heads} KV heads",
        2 * num_tokens * heads * head_dim * item_bytes
        + 2 * keys * kv_heads * head_dim * cache_bytes,
        4 * pairs * heads * head_dim,
    )


# operations on numbers for each number of a state and token
DELTA_RULE_FLOPS, SCAN_FLOPS = 7, 5


def states(
    query_lens: Sequence[int],
    state_shape: Sequence[int],
    state_bytes: int,
    token_bytes: int,
    flops: int,
) -> Work:
    """Returns the work of an operation that reads and writes a state of each request. state_bytes:
    of one number of the state; token_bytes: what it reads and writes for a token; flops: for each
    number of the state and token.
    """
    num_tokens, numbers = sum(query_lens), math.prod(state_shape)
    return Work(
        f"[{num_tokens}] · state {list(state_shape)}",
        2 * len(query_lens) * numbers * state_bytes + num_tokens * token_bytes,
        num_tokens * numbers * flops,
    )


def encoder_attention(
    lens: Sequence[int], heads: int, kv_heads: int, head_dim: int, item_bytes: int, window: int
) -> Work:
    """Returns the work of attention in both directions within texts of these lengths. window: 0, or
    the largest distance that a token sees.
    """
    num_tokens, pairs = sum(lens), 0
    for length in lens:
        near = min(window, length - 1) if window else length - 1
        pairs += length * (2 * near + 1) - near * (near + 1)
    return Work(
        f"[{num_tokens}, {heads}, {head_dim}] over {kv_heads} KV heads",
        2 * num_tokens * (heads + kv_heads) * head_dim * item_bytes,
        4 * pairs * heads * head_dim,
    )
