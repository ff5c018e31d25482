"""Attention over the paged cache on the CPU: gather the context, then torch's flash attention over it.
May know: torch on CPUs, the contracts.
Must not know: models, requests.

Decode: requests of similar length share one gather and one attention call; no loop over requests. A KV head's query heads are
the rows of one small matrix, [requests, NKV, group, D], so that its keys and values are read once: about twice as fast as enable_gqa.
Prefill: one request at a time; its query heads see the KV heads through a view of stride 0.

The gather goes by token, not by block (index_select costs the same), and a padded position repeats the request's own first token:
what lies in unwritten or foreign slots is never read. Masking alone would not do: NaN plus -inf is NaN, and so is 0 times NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import register
from .device import PRIORITY, is_cpu

CALL_COST_TOKENS = 512  # one more gather and attention call costs about as much as this many tokens of padding
MAX_GATHER_BYTES = 2**25  # of keys in one bucket: bounds the memory of a step
QUERY_TILE = 256  # query tokens per call where a mask is needed: bounds the mask


@dataclass(frozen=True)
class Bucket:
    """Decoding requests that are computed together, padded to the longest of them."""

    rows: Tensor | None  # [b] i64; None: all decoding requests, in order
    slots: Tensor  # [b * L] i64
    mask: Tensor | None  # [b, 1, 1, L], 0 or -inf; None: no padding


@register("paged_attention", name="cpu", predicate=is_cpu, priority=PRIORITY)
def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    num_decodes = metadata.num_decodes
    out = torch.empty(query.shape, dtype=query.dtype)
    if num_decodes:
        key = ("decode", key_cache.shape, query.dtype)
        if key not in metadata.scratch:
            metadata.scratch[key] = _plan_decode(metadata, key_cache, query.dtype)
        for bucket in metadata.scratch[key]:
            _decode(bucket, query[:num_decodes], key_cache, value_cache, out[:num_decodes], scale)
    start = num_decodes
    for row in range(num_decodes, len(metadata.query_lens)):
        end = start + metadata.query_lens[row]
        key = ("prefill", row, key_cache.shape[1])
        if key not in metadata.scratch:
            metadata.scratch[key] = _slots_of(metadata.block_tables[row], metadata.seq_lens_list[row], key_cache.shape[1])
        _prefill(query[start:end], key_cache, value_cache, metadata.scratch[key], out[start:end], scale)
        start = end
    return out


def _slots_of(block_tables: Tensor, length: int, block_size: int) -> Tensor:
    """block_tables [..., max_blocks] -> [..., length] i64: the slots of positions 0 to length - 1."""
    first = block_tables[..., : -(-length // block_size), None].long() * block_size
    return (first + torch.arange(block_size)).flatten(-2)[..., :length]


def _plan_decode(metadata: AttentionMetadata, key_cache: Tensor, dtype: torch.dtype) -> list[Bucket]:
    lengths = metadata.seq_lens_list[: metadata.num_decodes]
    token_bytes = key_cache.stride(1) * key_cache.element_size()
    groups = group_by_length(lengths, CALL_COST_TOKENS, MAX_GATHER_BYTES // token_bytes)
    return [_make_bucket(rows if len(groups) > 1 else None, metadata, key_cache.shape[1], dtype) for rows in groups]


def group_by_length(lengths: list[int], call_cost: int, max_tokens: int) -> list[list[int]]:
    """Splits rows into groups of similar length, longest first: a group closes when its padding would exceed `call_cost` tokens or its
    size `max_tokens`. So all padding together stays below call_cost times the number of groups."""
    groups: list[list[int]] = []
    longest = padding = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        padding += longest - lengths[row]
        if not groups or padding > call_cost or (len(groups[-1]) + 1) * longest > max_tokens:
            groups.append([])
            longest, padding = lengths[row], 0
        groups[-1].append(row)
    return groups


def _make_bucket(rows: list[int] | None, metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> Bucket:
    index = slice(metadata.num_decodes) if rows is None else torch.tensor(rows)
    lengths = metadata.seq_lens[index]
    longest = int(lengths.max())
    slots = _slots_of(metadata.block_tables[index], longest, block_size)
    if int(lengths.min()) == longest:
        return Bucket(None if rows is None else index, slots.flatten(), None)
    is_padding = torch.arange(longest) >= lengths[:, None]
    slots = torch.where(is_padding, slots[:, :1], slots)
    mask = torch.zeros(slots.shape, dtype=dtype).masked_fill_(is_padding, float("-inf"))
    return Bucket(None if rows is None else index, slots.flatten(), mask[:, None, None, :])


def _decode(bucket: Bucket, query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor, scale: float) -> None:
    num_kv_heads, head_dim = key_cache.shape[2:]
    if bucket.rows is not None:
        query = query.index_select(0, bucket.rows)
    grouped = query.unflatten(1, (num_kv_heads, -1))  # [b, NKV, group, D]
    kv_shape = (len(query), -1, num_kv_heads, head_dim)
    keys = _gather(key_cache, bucket.slots).view(kv_shape).transpose(1, 2)  # [b, NKV, L, D]
    values = _gather(value_cache, bucket.slots).view(kv_shape).transpose(1, 2)
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask, scale=scale)
    if bucket.rows is None:
        out.view(grouped.shape).copy_(attended)
    else:
        out.index_copy_(0, bucket.rows, attended.flatten(1, 2))


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """[num_blocks, block_size, NKV, D] at slots [n] -> [n, NKV * D]"""
    return cache.view(-1, cache.stride(1)).index_select(0, slots)


def _prefill(query: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, out: Tensor, scale: float) -> None:
    """One request: query [Lq, NQ, D], the last Lq of the len(slots) tokens of its context; fills out, of the same shape."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_queries, context = len(query), len(slots) - len(query)
    grouped = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [NKV, group, Lq, D]
    kv_shape = (len(slots), num_kv_heads, 1, head_dim)
    keys, values = (
        _gather(cache, slots).view(kv_shape).permute(1, 2, 0, 3).expand(-1, grouped.shape[1], -1, -1) for cache in (key_cache, value_cache)
    )
    grouped_out = out.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    if context == 0:
        grouped_out.copy_(F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale))
        return
    for start in range(0, num_queries, QUERY_TILE):
        end = min(start + QUERY_TILE, num_queries)
        visible = context + end  # of the keys, by the tile's last query
        mask = torch.full((end - start, visible), float("-inf"), dtype=query.dtype).triu_(context + start + 1)
        tile = F.scaled_dot_product_attention(grouped[:, :, start:end], keys[:, :, :visible], values[:, :, :visible], attn_mask=mask, scale=scale)
        grouped_out[:, :, start:end].copy_(tile)
