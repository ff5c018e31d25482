"""Declares the operations of LoRA adapters with their contracts.

Must not know: how an operation is implemented, models, requests, files of adapters.

ops.py states the conventions. An adapter of a linear layer with the weight W is a pair of matrices
A [rank, K] and B [N, rank]: the layer computes W x + scale * B (A x) for a row that uses it (Hu et
al. 2021). All adapters of a layer lie in memory of fixed size, one in each of L places. `adapters`
names the place of each row. A row without an adapter is not touched, and keeps its bits; a row's
bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import operation

LORA_BLOCK = 64  # outputs of B that lie together


def in_blocks(b: Tensor) -> Tensor:
    """B [N, rank] -> [ceil(N / LORA_BLOCK), rank, LORA_BLOCK], contiguous. What add_lora reads for
    some outputs is then one piece of memory. Zeros follow the last output.
    """
    if missing := -len(b) % LORA_BLOCK:
        b = torch.cat([b, b.new_zeros(missing, b.shape[1])])
    return b.unflatten(0, (-1, LORA_BLOCK)).transpose(1, 2).contiguous()


def first_blocks(slices: list[int]) -> list[int]:
    """Returns the index of each projection's first block, then the number of all blocks. Each
    projection begins a block.
    """
    found = [0]
    for size in slices:
        found.append(found[-1] - -size // LORA_BLOCK)
    return found


@operation
def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    adapters: Tensor,
    indices: Tensor | None,
    slices: list[int],
) -> None:
    """In place, y [T, N]: adds scale * B (A x) to the rows that have an adapter; x [T, K].

    The layer consists of S merged projections with `slices` outputs each, whose adapters are their
    own. a [L, S, R, K] and b [L, C, R, LORA_BLOCK], contiguous: A of each projection, and each B
    `in_blocks`, of which `first_blocks` are the first ones. scales [L, S] fp32 and ranks [L, S]
    i32, each in [0, R]: only so many rows of a and b are read, and none of a projection without an
    adapter. adapters [.] i32: the place in [0, L) of each row's adapter, or -1. With indices [T]
    i64, row t has adapters[indices[t]], else adapters[t].

    y has x's dtype, or it is fp32. Sums are in fp32, in an order that depends on K and on the rank
    alone; A x times the scale is in fp32; y is rounded once.
    """


@operation
def add_lora_embedding(
    y: Tensor,
    token_ids: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    adapters: Tensor,
) -> None:
    """In place, y [T, H]: add_lora for an embedding, where x is the unit vector of a token.

    token_ids [T] i32, each in [0, V); a [L, V, R] is A transposed, b [L, C, R, LORA_BLOCK]; scales
    [L, 1] fp32, ranks [L, 1] i32, adapters [T] i32.
    """
