"""Specifies the operations of text encoders. Attention is computed one request and one head at a
time.

Must not know: speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import register


@register("layer_norm", name="reference", priority=0)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normalised = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    scaled = normalised * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype)


@register("fused_add_layer_norm", name="reference", priority=0)
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    residual.add_(x)
    x.copy_(layer_norm(residual, weight, bias, eps))


@register("gelu", name="reference", priority=0)
def gelu(x: Tensor) -> Tensor:
    return F.gelu(x.float()).to(x.dtype)


@register("gelu_tanh", name="reference", priority=0)
def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x.float(), approximate="tanh").to(x.dtype)


@register("silu", name="reference", priority=0)
def silu(x: Tensor) -> Tensor:
    return F.silu(x.float()).to(x.dtype)


@register("relu", name="reference", priority=0)
def relu(x: Tensor) -> Tensor:
    return F.relu(x)


@register("relu_squared", name="reference", priority=0)
def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x.float()).square().to(x.dtype)


@register("gelu_and_mul", name="reference", priority=0)
def gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gelu(gate) * up


@register("encoder_attention", name="reference", priority=0)
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    group_size = query.shape[1] // key.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    start = 0
    for length in metadata.query_lens:
        rows = slice(start, start + length)
        position = torch.arange(length, device=query.device)
        distance = position[None, :] - position[:, None]  # of the key from the query
        for head in range(query.shape[1]):
            keys, values = (x[rows, head // group_size].float() for x in (key, value))
            scores = query[rows, head].float() @ keys.T * scale
            if bias is not None:
                most = bias.shape[1] // 2
                scores = scores + bias[head, most + distance.clamp(-most, most)]
            if window:
                scores = scores.masked_fill(distance.abs() > window, float("-inf"))
            out[rows, head] = (scores.softmax(-1) @ values).to(query.dtype)
        start += length
    return out
