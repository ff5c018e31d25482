"""Inputs for paged attention, and the same attention with torch's scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from quire.kernels.ops import AttentionMetadata
from quire.tests.kernels.case import INTERPRETED, Case, rand
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

FOREIGN_BLOCK = 2**30  # in block tables past a request's last block: following it would fail


def make_metadata(
    query_lens: list[int], seq_lens: list[int], block_size: int, num_blocks: int
) -> AttentionMetadata:
    """Blocks are assigned in random order; rows with one query token must come first."""
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    pages = torch.randperm(num_blocks, dtype=torch.int32).split([*counts, num_blocks - sum(counts)])
    block_tables = torch.full(
        (len(seq_lens), max(counts, default=0) + 1), FOREIGN_BLOCK, dtype=torch.int32
    )
    slots = [torch.zeros(0, dtype=torch.int64)]
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        block_tables[row, : counts[row]] = pages[row]
        position = torch.arange(seq_len - query_len, seq_len)
        slots.append(pages[row].long()[position // block_size] * block_size + position % block_size)
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return AttentionMetadata(
        starts, lengths, block_tables, torch.cat(slots), num_decodes, query_lens, seq_lens
    )


def context_slots(metadata: AttentionMetadata, row: int, block_size: int) -> tuple[Tensor, Tensor]:
    """(blocks, offsets) of a request's positions"""
    position = torch.arange(metadata.seq_lens_list[row])
    return metadata.block_tables[row].long()[position // block_size], position % block_size


def first_seen(query_len: int, seq_len: int, sliding_window: int = 0) -> int:
    """Return the first position that some query token sees."""
    return max(0, seq_len - query_len + 1 - sliding_window) if sliding_window else 0


def attention_case(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    *options: Any,
    is_apart: bool = False,
) -> Case:
    """heads: (NQ, NKV, D); options: sliding_window, softcap and sinks, if any. is_apart: other
    memory lies between the blocks of a cache.

    Every slot without an owner holds NaN, and so does one that all windows have left.
    """
    num_heads, num_kv_heads, head_dim = heads
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 3
    metadata = make_metadata(query_lens, seq_lens, block_size, num_blocks)
    shape = [num_blocks, block_size, num_kv_heads, head_dim]
    shape.insert(int(is_apart), 2)
    key_cache, value_cache = torch.full(shape, math.nan).to(dtype).unbind(int(is_apart))
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        first = first_seen(query_len, seq_len, *options[:1])
        blocks, offsets = context_slots(metadata, row, block_size)
        for cache in (key_cache, value_cache):
            values = rand(seq_len, num_kv_heads, head_dim, dtype=dtype)
            cache[blocks[first:], offsets[first:]] = values[first:]
    query = rand(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)[
        :, :num_heads
    ]
    batch = (
        f"queries {query_lens} of {seq_lens}" if len(seq_lens) < 6 else f"{len(seq_lens)} requests"
    )
    name = f"{batch}, {heads}, blocks of {block_size}, {options[:2]}"
    name += " sinks" * (options[2:3] not in ((), (None,))) + " later" * len(options[3:])
    name += " apart" * is_apart
    return Case(
        name,
        (query, key_cache, value_cache, metadata, head_dim**-0.5, *options),
        reference_attention,
    )


def make_sinks(num_heads: int) -> Tensor:
    """[num_heads]: from one without effect to one that takes nearly all weight."""
    sinks = torch.linspace(-4, 9, num_heads)
    sinks[0] = -math.inf
    return sinks


def make_later(query_lens: list[int], *images: tuple[int, int]) -> Tensor:
    """images: (first, end) of tokens of the step that see each other."""
    later = torch.zeros(sum(query_lens), dtype=torch.int32)
    for first, end in images:
        later[first:end] = torch.arange(end - first - 1, -1, -1)
    return later


def later_cases(dtype: torch.dtype) -> list[Case]:
    none: tuple[Any, ...] = (0, 0.0, None)
    short, long = [1, 9], [1, 30, 300]
    some = make_later(short, (2, 8))
    cases = [attention_case(short, [150, 100], (4, 2, 32), 16, dtype, *none, some)]
    if INTERPRETED:
        return cases
    many = make_later(long, (1, 20), (40, 296), (296, 331))
    return [
        *cases,
        attention_case(long, [9, 40, 900], (4, 1, 32), 16, dtype, *none, many),
        attention_case(long, [700, 30, 300], (4, 2, 64), 16, dtype, 280, 0.0, None, many),
        attention_case(long, [9, 40, 900], (3, 3, 16), 8, dtype, 280, 5.0, make_sinks(3), many),
    ]


def reference_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    later: Tensor | None = None,
    backend: SDPBackend = SDPBackend.MATH,
) -> tuple[Tensor, ...]:
    out = torch.empty_like(query)
    start, group = 0, query.shape[1] // key_cache.shape[2]
    for row, (query_len, seq_len) in enumerate(zip(metadata.query_lens, metadata.seq_lens_list)):
        blocks, offsets = context_slots(metadata, row, key_cache.shape[1])
        keys, values = (
            cache[blocks, offsets].transpose(0, 1).repeat_interleave(group, 0)
            for cache in (key_cache, value_cache)
        )
        mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        if sliding_window:
            mask = mask.triu(seq_len - query_len + 1 - sliding_window)
        if later is not None:
            last = torch.arange(seq_len - query_len, seq_len) + later[start : start + query_len]
            ahead = torch.arange(seq_len) <= last[:, None]
            mask |= ahead & torch.ones_like(mask).triu(seq_len - query_len + 1)
        first = first_seen(query_len, seq_len, sliding_window)
        keys, values, mask = keys[:, first:], values[:, first:], mask[:, first:]
        q = query[start : start + query_len].transpose(0, 1)
        if softcap or sinks is not None:  # transformers' Gemma 2 and gpt-oss
            logits = q @ keys.mT * scale
            logits = (logits / softcap).tanh() * softcap if softcap else logits
            logits = logits.masked_fill(~mask, -math.inf)
            if sinks is not None:
                column = sinks.to(q.dtype)[:, None, None].expand(-1, query_len, 1)
                logits = torch.cat((logits, column), -1)
            attended = logits.softmax(-1)[..., : keys.shape[1]] @ values
        else:
            with sdpa_kernel(backend):
                (attended,) = F.scaled_dot_product_attention(
                    q[None], keys[None], values[None], attn_mask=mask, scale=scale
                )
        out[start : start + query_len] = attended.transpose(0, 1)
        start += query_len
    return (out,)


def paged_attention(dtype: torch.dtype) -> list[Case]:
    bundled, qwen = (4, 2, 64), (14, 2, 64)
    if INTERPRETED:  # a tile of keys takes 10 ms there
        return [
            *later_cases(dtype),
            attention_case([1, 1, 1], [15, 1, 33], bundled, 16, dtype),
            attention_case([1, 1, 7, 80], [300, 3, 100, 80], (4, 1, 32), 16, dtype),
            attention_case([1, 9], [150, 100], (4, 2, 32), 16, dtype, 40, 3.0),
            attention_case([1, 9], [150, 40], (4, 2, 32), 16, dtype, 40, 0.0, make_sinks(4)),
            attention_case([1, 3], [40, 21], (4, 2, 512), 16, dtype, 30, is_apart=True),
        ]
    ragged = [50 + i for i in range(31)] + [1500]
    return [
        *later_cases(dtype),
        attention_case([1], [1], bundled, 16, dtype),
        attention_case([1], [16], bundled, 16, dtype),
        attention_case([1, 1, 1], [15, 17, 33], qwen, 16, dtype),
        attention_case([1] * 32, ragged, bundled, 16, dtype),
        attention_case([1] * 5, [40] * 5, (3, 3, 16), 8, dtype),
        attention_case([5], [5], bundled, 8, dtype),
        attention_case([7], [100], qwen, 16, dtype),
        attention_case([2, 300], [2, 700], (4, 1, 32), 32, dtype),
        attention_case([1, 1, 600, 20], [900, 3, 600, 37], bundled, 16, dtype),
        attention_case([1, 1, 1, 70, 300], [1, 100, 1500, 70, 900], bundled, 16, dtype, 64),
        attention_case([1, 7, 20], [1300, 7, 1100], qwen, 32, dtype, 500),
        attention_case([1, 1, 9, 30], [40, 300, 9, 200], (4, 1, 32), 16, dtype, 0, 2.0),
        attention_case([1, 1, 300], [600, 3, 700], (3, 3, 16), 8, dtype, 33, 5.0),
        attention_case([1, 5], [9, 100], (2, 2, 8), 16, dtype, 1),
        attention_case([1, 1, 9], [1, 700, 90], qwen, 16, dtype, 0, 0.0, make_sinks(14)),
        attention_case([1, 300], [600, 700], (4, 1, 32), 16, dtype, 33, 5.0, make_sinks(4)),
        attention_case([1, 1, 90], [600, 3, 200], (8, 1, 512), 16, dtype),
        attention_case([1, 40], [70, 130], (4, 2, 512), 16, dtype, 50, is_apart=True),
    ]
