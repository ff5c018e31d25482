"""Implements paged attention on the CPU: it gathers the context, then calls torch's flash
attention.

Must not know: models, requests.

In decode, requests of similar length share one gather and one attention call; there is no loop over
requests. The query heads of a KV head become the rows of one small matrix, [requests, NKV, group,
D], so keys and values are read once. This is about twice as fast as `enable_gqa`. In prefill, each
call computes one request, and query heads see the KV heads through a view of stride 0. With a
sliding window, positions before the window of a request's first token are not gathered. Torch's
attention has neither soft-cap nor sinks, so matrix products compute them.

The gather works by token, not by block (`index_select` costs the same). A padded position repeats
the request's own first token, so unwritten slots and slots of other requests are never read. A mask
alone is not enough: NaN plus -inf is NaN, and so is 0 times NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import register
from .device import PRIORITY, has_plain_cache

# One more gather and attention call costs about as much as this many tokens of padding.
CALL_COST_TOKENS = 512
# The keys in one bucket of several requests take at most so many bytes. Keys and values then stay
# in the cache between gather and attention.
GATHER_BYTES = 2**22
QUERY_TILE = 256  # query tokens per call where a mask is needed; bounds the mask


@dataclass(frozen=True)
class Bucket:
    """Decoding requests that are computed together, padded to the longest of them."""

    rows: Tensor | None  # [b] i64; None: all decoding requests, in order
    slots: Tensor  # [b * L] i64
    mask: Tensor | None  # [b, 1, 1, L], 0 or -inf; None: no padding


@register("paged_attention", name="cpu", predicate=has_plain_cache, priority=PRIORITY)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    later: Tensor | None = None,
) -> Tensor:
    num_decodes = start = metadata.num_decodes
    out = torch.empty(query.shape, dtype=query.dtype)
    buckets, prefill_slots, buffers = _plan_once(metadata, key_cache, sliding_window)
    attend = attend_decodes = partial(F.scaled_dot_product_attention, scale=scale)
    if softcap or sinks is not None:
        attend = attend_decodes = partial(_attend_by_products, scale=scale, softcap=softcap)
    if sinks is not None:
        by_kv_head = sinks.view(key_cache.shape[2], -1, 1)
        attend_decodes = partial(attend, sinks=by_kv_head)
        attend = partial(attend, sinks=by_kv_head[..., None])
    for bucket in buckets:
        _decode(
            bucket,
            query[:num_decodes],
            _gather(key_cache, value_cache, bucket.slots, buffers),
            out[:num_decodes],
            attend_decodes,
        )
    for query_len, slots in zip(metadata.query_lens[num_decodes:], prefill_slots):
        end = start + query_len
        _prefill(
            query[start:end],
            _gather(key_cache, value_cache, slots, buffers),
            out[start:end],
            attend,
            sliding_window,
            None if later is None else later[start:end],
        )
        start = end
    return out


def _gather(
    key_cache: Tensor, value_cache: Tensor, slots: Tensor, buffers: Tensor
) -> tuple[Tensor, Tensor]:
    """Gathers keys and values at slots [n], each [n, NKV, D], into the buffers [2, >= n, NKV * D].

    The result is valid until the next call. Freshly allocated memory would cost more in page faults
    than the copy itself.
    """
    gathered = buffers[:, : len(slots)]
    for cache, rows in zip((key_cache, value_cache), gathered.unbind(0)):
        if cache.is_contiguous():
            torch.index_select(cache.view(-1, cache.stride(1)), 0, slots, out=rows)
        else:  # other layers have parts of the same blocks
            block_size = cache.shape[1]
            rows.copy_(cache[slots // block_size, slots % block_size].flatten(1))
    keys, values = gathered.view(2, len(slots), *key_cache.shape[2:])
    return keys, values


# ---------------------------------------------------------------- once per step


def _plan_once(
    metadata: AttentionMetadata, key_cache: Tensor, sliding_window: int
) -> tuple[list[Bucket], list[Tensor], Tensor]:
    """Plans the decode buckets, the prefill slots and buffers for the largest of them.

    The plan is kept in `metadata.scratch` for the other layers.
    """
    key = ("cpu attention", *key_cache.shape[1:], key_cache.dtype, sliding_window)
    if key not in metadata.scratch:
        block_size, row = key_cache.shape[1], key_cache.stride(1)
        lengths = metadata.seq_lens_list
        seen = [
            length - _first_seen(length - size, sliding_window)
            for length, size in zip(lengths, metadata.query_lens)
        ]
        groups = group_by_length(
            seen[: metadata.num_decodes],
            CALL_COST_TOKENS,
            GATHER_BYTES // (row * key_cache.element_size()),
        )
        buckets = [
            _make_bucket(rows, metadata, seen, block_size, key_cache.dtype) for rows in groups
        ]
        prefills = range(metadata.num_decodes, len(lengths))
        prefill_slots = [
            _slots_of(metadata.block_tables[i], metadata.seq_lens[i] - seen[i], seen[i], block_size)
            for i in prefills
        ]
        most = max(map(len, [*(bucket.slots for bucket in buckets), *prefill_slots]), default=0)
        metadata.scratch[key] = (
            buckets,
            prefill_slots,
            torch.empty(2, most, row, dtype=key_cache.dtype),
        )
    return metadata.scratch[key]


def _first_seen(position: int, sliding_window: int) -> int:
    return max(0, position + 1 - sliding_window) if sliding_window else 0


def group_by_length(lengths: list[int], call_cost: int, max_tokens: int) -> list[list[int]]:
    """Splits rows into groups of similar length, longest first.

    A group closes when its padding would exceed `call_cost` tokens, or its size `max_tokens`. Total
    padding therefore stays below `call_cost` times the number of groups.
    """
    groups: list[list[int]] = []
    longest = padding = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        padding += longest - lengths[row]
        if not groups or padding > call_cost or (len(groups[-1]) + 1) * longest > max_tokens:
            groups.append([])
            longest, padding = lengths[row], 0
        groups[-1].append(row)
    return groups


def _make_bucket(
    rows: list[int],
    metadata: AttentionMetadata,
    seen: list[int],
    block_size: int,
    dtype: torch.dtype,
) -> Bucket:
    """`seen` says how many positions each request attends to, counted from its last."""
    is_everyone = len(rows) == metadata.num_decodes
    index = None if is_everyone else torch.tensor(rows)
    chosen = slice(len(rows)) if index is None else index
    longest, shortest = seen[rows[0]], seen[rows[-1]]
    lengths = torch.tensor(seen[: metadata.num_decodes])[chosen]
    slots = _slots_of(
        metadata.block_tables[chosen], metadata.seq_lens[chosen] - lengths, longest, block_size
    )
    mask = None
    if shortest < longest:
        is_padding = torch.arange(longest) >= lengths[:, None]
        slots = torch.where(is_padding, slots[:, :1], slots)
        mask = torch.zeros(slots.shape, dtype=dtype).masked_fill_(is_padding, float("-inf"))[
            :, None, None, :
        ]
    return Bucket(index, slots.flatten(), mask)


def _slots_of(block_tables: Tensor, first: Tensor, length: int, block_size: int) -> Tensor:
    """block_tables [..., max_blocks], first [...] -> [..., length] i64: slots of `length`
    positions.

    Positions start at `first`. Positions past the end of a table use its last block.
    """
    position = first[..., None] + torch.arange(length)
    blocks = block_tables.long().gather(
        -1, (position // block_size).clamp(max=block_tables.shape[-1] - 1)
    )
    return blocks * block_size + position % block_size


# ---------------------------------------------------------------- in every layer


def _attend_by_products(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Works as `F.scaled_dot_product_attention` in fp32, with softcap tanh(logit / softcap) for
    each logit, and with sinks, which broadcast to one more column of logits.
    """
    logits = query.float() @ keys.float().transpose(-1, -2) * (scale / (softcap or 1.0))
    if softcap:
        logits = softcap * torch.tanh(logits)
    if is_causal:
        attn_mask = torch.full(logits.shape[-2:], float("-inf")).triu_(1)
    if attn_mask is not None:
        logits = logits + attn_mask
    if sinks is not None:
        logits = torch.cat((logits, sinks.expand(*logits.shape[:-1], 1)), -1)
    weights = logits.softmax(-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)


def _decode(
    bucket: Bucket,
    query: Tensor,
    context: tuple[Tensor, Tensor],
    out: Tensor,
    attend: Callable[..., Tensor],
) -> None:
    """Computes a bucket's rows of `out`.

    query and out are [num_decodes, NQ, D]. `context` holds the bucket's keys and values, each [b *
    L, NKV, D].
    """
    if bucket.rows is not None:
        query = query.index_select(0, bucket.rows)
    num_requests, num_kv_heads = len(query), context[0].shape[1]
    grouped = query.unflatten(1, (num_kv_heads, -1))  # [b, NKV, group, D]
    # [b, NKV, L, D]
    keys, values = (tensor.unflatten(0, (num_requests, -1)).transpose(1, 2) for tensor in context)
    attended = attend(grouped, keys, values, attn_mask=bucket.mask)
    if bucket.rows is None:
        out.view(grouped.shape).copy_(attended)
    else:
        out.index_copy_(0, bucket.rows, attended.flatten(1, 2))


def _prefill(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    out: Tensor,
    attend: Callable[..., Tensor],
    sliding_window: int,
    later: Tensor | None = None,
) -> None:
    """Computes one request: query and out [Lq, NQ, D] are the last Lq tokens of its context.

    `context` holds its keys and values, each [Lk, NKV, D], starting at the first position that a
    query sees.
    """
    num_queries, num_kv_heads = len(query), context[0].shape[1]
    num_before = len(context[0]) - num_queries
    # [NKV, group, Lq, D]
    grouped, grouped_out = (
        tensor.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3) for tensor in (query, out)
    )
    # [NKV, group, Lk, D]
    keys, values = (
        tensor.transpose(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1) for tensor in context
    )
    if num_before == 0 and not 0 < sliding_window < num_queries and later is None:
        grouped_out.copy_(attend(grouped, keys, values, is_causal=True))
        return
    for start in range(0, num_queries, QUERY_TILE):
        end = min(start + QUERY_TILE, num_queries)
        # These are the keys that at least one query of the tile sees.
        first, stop = _first_seen(num_before + start, sliding_window), num_before + end
        ahead: Tensor | int = 0
        if later is not None:
            ahead = later[start:end, None]
            stop = min(stop + int(later[end - 1]), len(context[0]))
        positions = torch.arange(num_before + start, num_before + end)
        distance = positions[:, None] - torch.arange(first, stop)
        is_unseen = (distance < -ahead) | (distance >= (sliding_window or stop))
        mask = torch.zeros(is_unseen.shape, dtype=query.dtype).masked_fill_(
            is_unseen, float("-inf")
        )
        tile = attend(
            grouped[:, :, start:end],
            keys[:, :, first:stop],
            values[:, :, first:stop],
            attn_mask=mask,
        )
        grouped_out[:, :, start:end].copy_(tile)
