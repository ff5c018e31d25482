"""Inputs for the operations of text encoders, and the same operations written with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from quire.kernels.ops import AttentionMetadata
from quire.kernels.ops import make_metadata as join_metadata
from quire.tests.kernels.case import INTERPRETED, Case, rand
from torch import Tensor

RAGGED = [1, 2, 7, 16, 31, 32, 33, 63, 64, 65, 90, 128, 130]


def encoder_metadata(lengths: list[int]) -> AttentionMetadata:
    """As the runner makes it for an encoder: there are no blocks."""
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return join_metadata(
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        [torch.zeros(len(lengths), 0, dtype=torch.int32)],
        [torch.zeros(0, dtype=torch.int64)],
        0,
        lengths,
        lengths,
    )


def rows_of_norms(dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """x, in several layouts; the last has a mean far from 0."""
    shapes = [(1, 128), (3, 384), (33, 100), (2, 1), (7, 1030), (0, 8)]
    if INTERPRETED:
        shapes = shapes[2:3]
    found = [(f"{shape}", rand(*shape, dtype=dtype)) for shape in shapes]
    return [
        *found,
        ("strided", rand(6, 300, dtype=dtype)[:, 50:178]),
        ("far from 0", (torch.randn(9, 384) + 5).to(dtype)),
    ]


def layer_norm(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        return (F.layer_norm(x, weight.shape, weight, bias, eps),)

    def case(name: str, x: Tensor, has_bias: bool) -> Case:
        weight, bias = rand(2, x.shape[1], dtype=dtype)
        return Case(
            f"{name}{' + bias' * has_bias}", (x, weight, bias if has_bias else None, 1e-12), own
        )

    return [case(*one, has_bias) for one in rows_of_norms(dtype) for has_bias in (True, False)]


def fused_add_layer_norm(dtype: torch.dtype) -> list[Case]:
    def own(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, ...]:
        total = x + residual
        return F.layer_norm(total, weight.shape, weight, bias, eps), total

    def case(name: str, x: Tensor, has_bias: bool) -> Case:
        weight, bias = rand(2, x.shape[1], dtype=dtype)
        args = x, rand(*x.shape, dtype=dtype), weight, bias if has_bias else None, 1e-5
        return Case(f"{name}{' + bias' * has_bias}", args, own, in_place=(0, 1))

    return [case(*one, has_bias) for one in rows_of_norms(dtype) for has_bias in (True, False)]


def activation(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor) -> tuple[Tensor, ...]:
        return (function(x),)

    wide = rand(5, 80, dtype=dtype)[:, 3:70]
    shapes = [(1, 1), (37, 96), (4, 1536), (0, 8)]
    if INTERPRETED:
        shapes = shapes[2:3]
    return [
        *(Case(f"{shape}", (rand(*shape, dtype=dtype) * 3,), own) for shape in shapes),
        Case("strided", (wide,), own),
    ]


def gelu(dtype: torch.dtype) -> list[Case]:
    return activation(F.gelu, dtype)


def gelu_tanh(dtype: torch.dtype) -> list[Case]:
    return activation(lambda x: F.gelu(x, approximate="tanh"), dtype)


def silu(dtype: torch.dtype) -> list[Case]:
    return activation(F.silu, dtype)


def relu(dtype: torch.dtype) -> list[Case]:
    return activation(F.relu, dtype)


def relu_squared(dtype: torch.dtype) -> list[Case]:
    return activation(lambda x: F.relu(x).square(), dtype)


def gelu_and_mul(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor) -> tuple[Tensor, ...]:
        gate, up = x.chunk(2, -1)
        return (F.gelu(gate) * up,)

    shapes = [(1, 2), (1, 352), (37, 96), (4, 2304)]
    if INTERPRETED:
        shapes = shapes[3:]
    return [Case(f"{shape}", (rand(*shape, dtype=dtype) * 3,), own) for shape in shapes]


def encoder_attention(dtype: torch.dtype) -> list[Case]:
    if INTERPRETED:  # a window and a bias reach over several tiles of keys
        return [
            encoder_case([5, 64, 1], (2, 1, 72), dtype),
            encoder_case([150], (1, 1, 16), dtype, 30, make_bias(1, 20)),
        ]
    return [
        encoder_case([1], (2, 2, 32), dtype),
        encoder_case([12], (12, 12, 32), dtype),
        encoder_case([5, 64, 1, 33], (3, 3, 64), dtype),
        encoder_case([], (2, 2, 32), dtype),
        encoder_case([150, 7], (2, 1, 72), dtype),
        encoder_case([7, 131], (2, 2, 80), dtype),
        encoder_case([65], (2, 2, 96), dtype),
        encoder_case(RAGGED, (2, 2, 32), dtype),
        encoder_case(RAGGED, (2, 2, 64), dtype, 8),
        encoder_case([20, 300], (2, 2, 64), dtype, 64),
        encoder_case([130, 70, 3], (3, 1, 256), dtype, 33),
        encoder_case([100, 700], (4, 2, 128), dtype),
        encoder_case([9, 150, 64], (3, 3, 64), dtype, 0, make_bias(3, 20)),
        encoder_case([1, 40, 200], (4, 4, 32), dtype, 50, make_bias(4, 128)),
        encoder_case([70, 3], (2, 2, 8), dtype, 1),
    ]


def make_bias(num_heads: int, distance: int) -> Tensor:
    """[num_heads, 2 * distance + 1]"""
    return torch.randn(num_heads, 2 * distance + 1)


def encoder_case(
    lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype, *options: Any
) -> Case:
    """heads: (NQ, NKV, D); options: window and bias, if any."""
    num_heads, num_kv_heads, head_dim = heads
    qkv = rand(sum(lengths), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    name = f"{lengths}, {heads}, {options[:1]}{' bias' * len(options[1:])}"
    args = query, key, value, encoder_metadata(lengths), head_dim**-0.5, *options
    return Case(name, args, attend_both_ways)


def attend_both_ways(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """As transformers' eager attention of encoders, with its masks of zeros and -inf."""
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for rows in torch.arange(len(query)).split(metadata.query_lens):
        q, k, v = (x[rows].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        scores = q @ k.mT * scale
        distance = rows[None, :] - rows[:, None]
        if bias is not None:
            most = bias.shape[1] // 2
            scores = scores + bias.to(scores.dtype)[:, most + distance.clamp(-most, most)]
        if window:
            scores = scores.masked_fill(distance.abs() > window, float("-inf"))
        attended = (
            scores.float().softmax(-1) if scores.dtype != torch.float64 else scores.softmax(-1)
        )
        out[rows] = (attended.to(q.dtype) @ v).transpose(0, 1)
    return (out,)


ENCODER_OPS = {
    f.__name__: f
    for f in (
        layer_norm,
        fused_add_layer_norm,
        gelu,
        gelu_tanh,
        silu,
        relu,
        relu_squared,
        gelu_and_mul,
        encoder_attention,
    )
}
