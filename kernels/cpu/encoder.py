"""Implements the operations of text encoders on the CPU by torch's kernels.

Must not know: models, requests.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import register
from .device import PRIORITY, is_cpu

QUERY_TILE = 256  # query tokens per call where a mask is needed; bounds the mask


@register("layer_norm", name="cpu", predicate=is_cpu, priority=PRIORITY)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@register("fused_add_layer_norm", name="cpu", predicate=is_cpu, priority=PRIORITY)
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    residual.add_(x)
    x.copy_(F.layer_norm(residual, weight.shape, weight, bias, eps))


@register("gelu", name="cpu", predicate=is_cpu, priority=PRIORITY)
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


@register("gelu_tanh", name="cpu", predicate=is_cpu, priority=PRIORITY)
def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@register("silu", name="cpu", predicate=is_cpu, priority=PRIORITY)
def silu(x: Tensor) -> Tensor:
    return F.silu(x)


@register("gelu_and_mul", name="cpu", predicate=is_cpu, priority=PRIORITY)
def gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


@register("encoder_attention", name="cpu", predicate=is_cpu, priority=PRIORITY)
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Calls torch's attention per request or, with a window or a bias, per QUERY_TILE tokens."""
    out = torch.empty(query.shape, dtype=query.dtype)
    group_size = query.shape[1] // key.shape[1]
    start = 0
    for length in metadata.query_lens:
        # [heads, length, D]; query heads see the KV heads through a view of stride 0
        queries, results = (x[start : start + length].transpose(0, 1) for x in (query, out))
        keys, values = (
            x[start : start + length].transpose(0, 1)[:, None].expand(-1, group_size, -1, -1)
            for x in (key, value)
        )
        queries, results = (x.unflatten(0, (-1, group_size)) for x in (queries, results))
        tile = QUERY_TILE if window or bias is not None else max(length, 1)
        for begin in range(0, length, tile):
            end = min(begin + tile, length)
            first, stop = 0, length
            if window:
                first, stop = max(begin - window, 0), min(end + window, length)
            mask = _mask(begin, end, first, stop, window, bias, query)
            if mask is not None:
                mask = mask.expand(query.shape[1], -1, -1).unflatten(0, (-1, group_size))
            attended = F.scaled_dot_product_attention(
                queries[:, :, begin:end],
                keys[:, :, first:stop],
                values[:, :, first:stop],
                attn_mask=mask,
                scale=scale,
            )
            results[:, :, begin:end].copy_(attended)
        start += length
    return out


def _mask(
    begin: int, end: int, first: int, stop: int, window: int, bias: Tensor | None, query: Tensor
) -> Tensor | None:
    """Returns what is added to the logits of query tokens from `begin` and key tokens from `first`
    on: [NQ, end - begin, stop - first] or one of all heads.
    """
    if not window and bias is None:
        return None
    distance = torch.arange(first, stop) - torch.arange(begin, end)[:, None]
    mask = torch.zeros(1, *distance.shape)
    if bias is not None:
        most = bias.shape[1] // 2
        mask = bias[:, most + distance.clamp(-most, most)]
    if window:
        mask = mask.masked_fill(distance.abs() > window, float("-inf"))
    return mask.to(query.dtype)
