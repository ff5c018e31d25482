"""Specifies multi-head latent attention, one request at a time.

Must not know: speed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import register


@register("pack_head_linear", name="reference", priority=0)
def pack_head_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


@register("store_latents", name="reference", priority=0)
def store_latents(latent: Tensor, rotary_key: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    rows = torch.cat((latent, rotary_key), -1)
    stored = slot_mapping >= 0
    cache.view(-1, cache.shape[-1])[slot_mapping[stored]] = rows[stored]


@register("latent_attention", name="reference", priority=0)
def latent_attention(
    query: Tensor,
    rotary_query: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> Tensor:
    block_size, rank = cache.shape[1], query.shape[2]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    whole = torch.cat((query, rotary_query), -1).float()
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        q = whole[starts[row] : starts[row + 1]].transpose(0, 1)  # [NQ, Lq, R + DR]
        position = torch.arange(seq_len, device=query.device)
        blocks = metadata.block_tables[row].long()[position // block_size]
        keys = cache[blocks, position % block_size, 0].float()  # [seq_len, R + DR]
        is_unseen = position[None, :] > position[seq_len - q.shape[1] :, None]
        weights = (q @ keys.T * scale).masked_fill(is_unseen, float("-inf")).softmax(-1)
        attended = weights @ keys[:, :rank]
        out[starts[row] : starts[row + 1]] = attended.transpose(0, 1).to(query.dtype)
    return out
