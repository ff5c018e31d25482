"""Declares the operations of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2) with their
contracts, for ops.py.

Must not know: how an operation is implemented, models, requests.

T, NQ, "dtype": as in ops.py. R is the size of a token's latent vector, DR that of the part of its
key that is rotated. All heads share both: the cache [num_blocks, block_size, 1, R + DR], contiguous
and of dtype, holds the latent vector of a token and then its rotated key. A key is the whole row, a
value its first R elements; there is no other cache.
"""

# pyright: reportReturnType=false
# (a contract has no body)

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from .registry import operation

if TYPE_CHECKING:
    from .metadata import AttentionMetadata


@operation
def pack_head_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Lays out weight [N, M, K], a matrix for each of N heads; returns a function x [T, N, K] ->
    [T, N, M]: each head's x times its weight^T.

    Sums are in fp32 and rounded once. x may be a view, whose last dimension is contiguous.
    """


@operation
def store_latents(latent: Tensor, rotary_key: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores latent [T, R] and rotary_key [T, DR] side by side in the cache.

    slot_mapping [T] i64: as in reshape_and_cache.
    """


@operation
def latent_attention(
    query: Tensor,
    rotary_query: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> Tensor:
    """Causal attention of query [T, NQ, R] and rotary_query [T, NQ, DR] over the cached context ->
    [T, NQ, R].

    A logit is (query . latent + rotary_query . rotated key) * scale, and a result the sum of latent
    vectors with the weights of their softmax. The query is already multiplied by the matrix that
    makes keys of latent vectors, and the matrix that makes values is applied to the result
    ("absorbed"). The cache holds this step's tokens. Softmax and sums are in fp32. A slot that a
    request's tokens do not see has no effect on its result, as in paged_attention.
    """
