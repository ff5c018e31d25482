"""Specifies the paged KV cache and attention, one request and one query head at a time.

Must not know: speed.
"""

import torch
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import register
from .kv_cache import load, store
from .norm import rms_norm
from .rotary import rotary_embedding


@register("reshape_and_cache", name="reference", priority=0)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            store(key[token], key_cache, slot // block_size, slot % block_size, is_key=True)
            store(value[token], value_cache, slot // block_size, slot % block_size, is_key=False)


@register("fused_qk_rope_reshape_and_cache", name="reference", priority=0)
def fused_qk_rope_reshape_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    if query_norm is not None:
        query.copy_(rms_norm(query, query_norm, eps))
    key = key.clone() if key_norm is None else rms_norm(key, key_norm, eps)
    rotary_embedding(positions, query, key, cos_sin_cache)
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


@register("paged_attention", name="reference", priority=0)
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
    block_size = key_cache.shape[1]
    group_size = query.shape[1] // key_cache.shape[2]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        q = query[starts[row] : starts[row + 1]].float()  # [Lq, NQ, D]
        first_position = seq_len - len(q)
        first = max(0, first_position + 1 - sliding_window) if sliding_window else 0
        position = torch.arange(first, seq_len, device=query.device)
        blocks = metadata.block_tables[row].long()[position // block_size]
        offsets = position % block_size
        # [seq_len - first, NKV, D]
        k = load(key_cache, blocks, offsets, is_key=True)
        v = load(value_cache, blocks, offsets, is_key=False)
        distance = position[-len(q) :, None] - position[None, :]  # [Lq, seq_len - first]
        ahead = 0 if later is None else later[starts[row] : starts[row + 1], None]
        is_unseen = (distance < -ahead) | (distance >= (sliding_window or seq_len))
        for head in range(query.shape[1]):
            kv_head = head // group_size
            scores = q[:, head] @ k[:, kv_head].T * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(is_unseen, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].expand(len(q), 1)), -1)
            weights = scores.softmax(-1)[:, : len(k)]
            out[starts[row] : starts[row + 1], head] = (weights @ v[:, kv_head]).to(query.dtype)
    return out


@register("copy_blocks", name="reference", priority=0)
def copy_blocks(sources: list[Tensor], destinations: list[Tensor], pairs: Tensor) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        for from_block, to_block in pairs.tolist():
            destination[to_block] = source[from_block]
