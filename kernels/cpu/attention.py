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
GATHER_BYTES = 2**22  # of keys in one bucket of several requests: keys and values stay in the cache between gather and attention
QUERY_TILE = 256  # query tokens per call where a mask is needed: bounds the mask


@dataclass(frozen=True)
class Bucket:
    """Decoding requests that are computed together, padded to the longest of them."""

    rows: Tensor | None  # [b] i64; None: all decoding requests, in order
    slots: Tensor  # [b * L] i64
    mask: Tensor | None  # [b, 1, 1, L], 0 or -inf; None: no padding


@register("paged_attention", name="cpu", predicate=is_cpu, priority=PRIORITY)
def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    num_decodes = start = metadata.num_decodes
    out = torch.empty(query.shape, dtype=query.dtype)
    buckets, prefill_slots, buffers = _plan_once(metadata, key_cache)
    for bucket in buckets:
        _decode(bucket, query[:num_decodes], _gather(key_cache, value_cache, bucket.slots, buffers), out[:num_decodes], scale)
    for query_len, slots in zip(metadata.query_lens[num_decodes:], prefill_slots):
        end = start + query_len
        _prefill(query[start:end], _gather(key_cache, value_cache, slots, buffers), out[start:end], scale)
        start = end
    return out


def _gather(key_cache: Tensor, value_cache: Tensor, slots: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at slots [n], each [n, NKV, D], in the buffers [2, >= n, NKV * D]: valid until the next call.

    Memory that is fresh for each call would cost more in page faults than the copy itself.
    """
    gathered = buffers[:, : len(slots)]
    for cache, rows in zip((key_cache, value_cache), gathered.unbind(0)):
        torch.index_select(cache.view(-1, cache.stride(1)), 0, slots, out=rows)
    return gathered.view(2, len(slots), *key_cache.shape[2:]).unbind(0)


# ---------------------------------------------------------------- once per step


def _plan_once(metadata: AttentionMetadata, key_cache: Tensor) -> tuple[list[Bucket], list[Tensor], Tensor]:
    """The decode buckets, each prefill's slots, and buffers for the largest of these; kept in metadata.scratch for the other layers."""
    key = ("cpu attention", *key_cache.shape[1:], key_cache.dtype)
    if key not in metadata.scratch:
        block_size, row = key_cache.shape[1], key_cache.stride(1)
        lengths = metadata.seq_lens_list
        groups = group_by_length(lengths[: metadata.num_decodes], CALL_COST_TOKENS, GATHER_BYTES // (row * key_cache.element_size()))
        buckets = [_make_bucket(rows, metadata, block_size, key_cache.dtype) for rows in groups]
        prefill_slots = [_slots_of(metadata.block_tables[i], lengths[i], block_size) for i in range(metadata.num_decodes, len(lengths))]
        most = max(map(len, [*(bucket.slots for bucket in buckets), *prefill_slots]), default=0)
        metadata.scratch[key] = buckets, prefill_slots, torch.empty(2, most, row, dtype=key_cache.dtype)
    return metadata.scratch[key]


def group_by_length(lengths: list[int], call_cost: int, max_tokens: int) -> list[list[int]]:
    """Splits rows into groups of similar length, longest first: a group closes when its padding would exceed `call_cost` tokens, or its
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


def _make_bucket(rows: list[int], metadata: AttentionMetadata, block_size: int, dtype: torch.dtype) -> Bucket:
    is_everyone = len(rows) == metadata.num_decodes
    index = slice(len(rows)) if is_everyone else torch.tensor(rows)
    longest, shortest = metadata.seq_lens_list[rows[0]], metadata.seq_lens_list[rows[-1]]
    slots = _slots_of(metadata.block_tables[index], longest, block_size)
    mask = None
    if shortest < longest:
        is_padding = torch.arange(longest) >= metadata.seq_lens[index][:, None]
        slots = torch.where(is_padding, slots[:, :1], slots)
        mask = torch.zeros(slots.shape, dtype=dtype).masked_fill_(is_padding, float("-inf"))[:, None, None, :]
    return Bucket(None if is_everyone else index, slots.flatten(), mask)


def _slots_of(block_tables: Tensor, length: int, block_size: int) -> Tensor:
    """block_tables [..., max_blocks] -> [..., length] i64: the slots of positions 0 to length - 1."""
    first = block_tables[..., : -(-length // block_size), None].long() * block_size
    return (first + torch.arange(block_size)).flatten(-2)[..., :length]


# ---------------------------------------------------------------- in every layer


def _decode(bucket: Bucket, query: Tensor, context: tuple[Tensor, Tensor], out: Tensor, scale: float) -> None:
    """query and out [num_decodes, NQ, D]; context: the bucket's keys and values, each [b * L, NKV, D]. Fills the bucket's rows of out."""
    if bucket.rows is not None:
        query = query.index_select(0, bucket.rows)
    num_requests, num_kv_heads = len(query), context[0].shape[1]
    grouped = query.unflatten(1, (num_kv_heads, -1))  # [b, NKV, group, D]
    keys, values = (tensor.unflatten(0, (num_requests, -1)).transpose(1, 2) for tensor in context)  # [b, NKV, L, D]
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask, scale=scale)
    if bucket.rows is None:
        out.view(grouped.shape).copy_(attended)
    else:
        out.index_copy_(0, bucket.rows, attended.flatten(1, 2))


def _prefill(query: Tensor, context: tuple[Tensor, Tensor], out: Tensor, scale: float) -> None:
    """One request: query and out [Lq, NQ, D], the last Lq tokens of its context; context: its keys and values, each [Lk, NKV, D]."""
    num_queries, num_kv_heads = len(query), context[0].shape[1]
    num_before = len(context[0]) - num_queries
    grouped, grouped_out = (tensor.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3) for tensor in (query, out))  # [NKV, group, Lq, D]
    keys, values = (tensor.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1) for tensor in context)  # [NKV, group, Lk, D]
    if num_before == 0:
        grouped_out.copy_(F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale))
        return
    for start in range(0, num_queries, QUERY_TILE):
        end = min(start + QUERY_TILE, num_queries)
        visible = num_before + end  # of the keys, by the tile's last query
        mask = torch.full((end - start, visible), float("-inf"), dtype=query.dtype).triu_(num_before + start + 1)
        context_of_tile = keys[:, :, :visible], values[:, :, :visible]
        grouped_out[:, :, start:end].copy_(
            F.scaled_dot_product_attention(grouped[:, :, start:end], *context_of_tile, attn_mask=mask, scale=scale)
        )
