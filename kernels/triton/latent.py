"""Implements multi-head latent attention in Triton.

Must not know: models, requests.

A program handles one token and up to ROWS of its query heads, which all read the same cache, and
visits the tiles of its context in order. A token's bits therefore depend on its position alone.
The context is not split, so few tokens with long contexts do not fill a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import register
from .attention_tile import NOTHING, capped, normalised, online_softmax, slots_of
from .device import PRIORITY, TILE, is_cuda

ROWS, KEYS = 16, 32  # heads of a program, and keys of a tile


class PackedHeads:
    """Keeps the layout of the weight [N, M, K]."""

    def __init__(self, weight: Tensor):
        self.weight = weight.transpose(1, 2)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, N, K] -> [T, N, M]"""
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


@register("pack_head_linear", name="cublas", predicate=is_cuda, priority=PRIORITY)
def pack_head_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return PackedHeads(weight)


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    latent_ptr,
    key_ptr,
    cache_ptr,
    slots_ptr,
    num_tokens,
    latent_stride,
    key_stride,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A program stores TOKENS rows of SIZE elements, of which the first RANK are the latents."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    stored = (slot >= 0)[:, None] & (column < SIZE)[None, :]
    is_latent = (column < RANK)[None, :]
    latent = tl.load(
        latent_ptr + (token * latent_stride)[:, None] + column[None, :], mask=stored & is_latent
    )
    key = tl.load(
        key_ptr + (token * key_stride)[:, None] + (column - RANK)[None, :],
        mask=stored & (column >= RANK)[None, :],
    )
    place = (slot * SIZE)[:, None] + column[None, :]
    tl.store(cache_ptr + place, tl.where(is_latent, latent, key), mask=stored)


@register("store_latents", name="triton", predicate=is_cuda, priority=PRIORITY)
def store_latents(latent: Tensor, rotary_key: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    num_tokens, block = len(latent), triton.next_power_of_2(cache.shape[3])
    tokens = max(1, TILE // block)
    store_kernel[(triton.cdiv(num_tokens, tokens),)](
        latent,
        rotary_key,
        cache,
        slot_mapping,
        num_tokens,
        latent.stride(0),
        rotary_key.stride(0),
        RANK=latent.shape[1],
        SIZE=cache.shape[3],
        BLOCK=block,
        TOKENS=tokens,
    )


@triton.jit
def _request_of(token, starts_ptr, num_requests, REQUESTS: tl.constexpr):
    """The index of the request that a token is of. starts [num_requests + 1]"""
    request = tl.arange(0, REQUESTS)
    ends = tl.load(starts_ptr + 1 + request, mask=request < num_requests, other=2147483647)
    return tl.sum((ends <= token).to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_requests", "num_decodes", "table_stride"])
def attention_kernel(
    query_ptr,
    rotary_ptr,
    cache_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    scale,
    num_requests,
    num_decodes,
    table_stride,
    query_stride,
    query_head_stride,
    rotary_stride,
    rotary_head_stride,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Grid (tokens, parts of ROWS heads). out [tokens, HEADS, RANK] contiguous."""
    token, part = tl.program_id(0), tl.program_id(1)
    request, later = token, 0
    if token >= num_decodes:
        request = _request_of(token, starts_ptr, num_requests, REQUESTS)
        later = tl.load(starts_ptr + request + 1) - token - 1
    length = tl.load(lengths_ptr + request) - later  # what this token sees

    heads = part * ROWS + tl.arange(0, ROWS)
    columns, rotary_columns = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROTARY)
    is_head, is_rotary = heads < HEADS, rotary_columns < ROTARY
    in_rank = columns < RANK
    stored = is_head[:, None] & in_rank[None, :]
    row = token.to(tl.int64)
    query = tl.load(
        query_ptr + row * query_stride + heads[:, None] * query_head_stride + columns[None, :],
        mask=stored,
        other=0.0,
    )
    rotary = tl.load(
        rotary_ptr
        + row * rotary_stride
        + heads[:, None] * rotary_head_stride
        + rotary_columns[None, :],
        mask=is_head[:, None] & is_rotary[None, :],
        other=0.0,
    )
    table = tables_ptr + request.to(tl.int64) * table_stride
    SLOT: tl.constexpr = RANK + ROTARY
    largest = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_RANK), tl.float32)
    for tile in range(tl.cdiv(length, KEYS)):
        positions = tile * KEYS + tl.arange(0, KEYS)
        seen = positions < length
        slots = slots_of(table, positions, seen, BLOCK_SIZE * SLOT, SLOT, BLOCK_SIZE, KEYS, True)
        latents = tl.load(
            cache_ptr + slots[:, None] + columns[None, :],
            mask=seen[:, None] & in_rank[None, :],
            other=0.0,
        )
        keys = tl.load(
            cache_ptr + slots[:, None] + (RANK + rotary_columns)[None, :],
            mask=seen[:, None] & is_rotary[None, :],
            other=0.0,
        )
        scores = tl.dot(rotary, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(query, tl.trans(latents), scores, input_precision="ieee")
        scores, factor = capped(scores, scale, 0.0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest, total, acc = online_softmax(scores, factor, latents, largest, total, acc)
    tl.store(
        out_ptr + (row * HEADS + heads)[:, None] * RANK + columns[None, :],
        normalised(total, acc, 1.0).to(out_ptr.dtype.element_ty),
        mask=stored,
    )


@register("latent_attention", name="triton", predicate=is_cuda, priority=PRIORITY)
def latent_attention(
    query: Tensor,
    rotary_query: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> Tensor:
    num_tokens, heads, rank = query.shape
    rotary_dim, num_requests = rotary_query.shape[2], metadata.seq_lens.shape[0]
    out = query.new_empty(query.shape)
    attention_kernel[num_tokens, triton.cdiv(heads, ROWS)](
        query,
        rotary_query,
        cache,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        out,
        scale,
        num_requests,
        metadata.num_decodes,
        metadata.block_tables.stride(0),
        *query.stride()[:2],
        *rotary_query.stride()[:2],
        HEADS=heads,
        ROWS=ROWS,
        RANK=rank,
        ROTARY=rotary_dim,
        BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
        BLOCK_ROTARY=max(16, triton.next_power_of_2(rotary_dim)),
        BLOCK_SIZE=cache.shape[1],
        KEYS=KEYS,
        REQUESTS=triton.next_power_of_2(num_requests),
        num_warps=8,
        num_stages=2,
        enable_fp_fusion=False,
    )
    return out
