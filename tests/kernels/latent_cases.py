"""Inputs for multi-head latent attention, and the same attention with plain products of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from quire.kernels.ops import AttentionMetadata
from quire.tests.kernels.attention_cases import context_slots, make_metadata
from quire.tests.kernels.case import INTERPRETED, Case, rand
from torch import Tensor


def pack_head_linear(dtype: torch.dtype) -> list[Case]:
    """Packs the weight, then multiplies x, which is a view of wider heads."""

    class Packed(Case):
        def call(self, function: Callable, args: list[Any]) -> Tensor:
            with torch.inference_mode():
                return function(args[1])(args[0])

    def own(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (torch.einsum("tnk,nmk->tnm", x, weight),)

    def case(num_tokens: int, heads: int, in_features: int, out_features: int) -> Case:
        weight = (torch.randn(heads, out_features, in_features) / in_features**0.5).to(dtype)
        x = rand(num_tokens, heads, in_features + 8, dtype=dtype)[..., :in_features]
        return Packed(f"{num_tokens} x {heads} x {in_features} x {out_features}", (x, weight), own)

    shapes = [(1, 4, 16, 32), (7, 5, 48, 24), (130, 3, 64, 100), (2, 20, 192, 512), (0, 2, 8, 8)]
    return [case(*shape) for shape in shapes]


def store_latents(dtype: torch.dtype) -> list[Case]:
    def own(latent: Tensor, key: Tensor, cache: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        written = cache.clone()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                written[slot // 8, slot % 8, 0] = torch.cat((latent[token], key[token]))
        return (written,)

    def case(name: str, slots: Tensor, rank: int, rotary_dim: int) -> Case:
        joined = rand(len(slots), rank + rotary_dim, dtype=dtype)
        cache = rand(10, 8, 1, rank + rotary_dim, dtype=dtype)
        args = joined[:, :rank].clone(), joined[:, rank:], cache, slots
        return Case(name, args, own, in_place=(2,))

    holes = torch.randperm(80)[:30]
    holes[3::4] = -1
    return [
        case("scattered", torch.randperm(80)[:50], 32, 16),
        case("holes", holes, 512, 64),
        case("none stored", torch.tensor([-1, -1]), 24, 8),
        case("empty", torch.zeros(0, dtype=torch.int64), 24, 8),
    ]


def latent_case(
    query_lens: list[int],
    seq_lens: list[int],
    sizes: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
) -> Case:
    """sizes: (NQ, R, DR). Every slot without an owner holds NaN."""
    num_heads, rank, rotary_dim = sizes
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 3
    metadata = make_metadata(query_lens, seq_lens, block_size, num_blocks)
    cache = torch.full((num_blocks, block_size, 1, rank + rotary_dim), math.nan).to(dtype)
    for row, seq_len in enumerate(seq_lens):
        cache[context_slots(metadata, row, block_size)] = rand(
            seq_len, 1, rank + rotary_dim, dtype=dtype
        )
    query = rand(sum(query_lens), num_heads, rank, dtype=dtype)
    rotary_query = rand(sum(query_lens), num_heads, rotary_dim + 8, dtype=dtype)[..., 8:]
    name = f"queries {query_lens} of {seq_lens}, {sizes}, blocks of {block_size}"
    scale = (rank + rotary_dim) ** -0.5
    return Case(name, (query, rotary_query, cache, metadata, scale), attend)


def attend(
    query: Tensor,
    rotary_query: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> tuple[Tensor, ...]:
    out = torch.empty_like(query)
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(metadata.query_lens, metadata.seq_lens_list)):
        keys = cache[context_slots(metadata, row, cache.shape[1])][:, 0]
        latents, rotated = keys.split((query.shape[2], rotary_query.shape[2]), -1)
        rows = slice(start, start + query_len)
        logits = torch.einsum("thr,ur->htu", query[rows], latents)
        logits = (logits + torch.einsum("thr,ur->htu", rotary_query[rows], rotated)) * scale
        mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
        out[rows] = torch.einsum("htu,ur->thr", weights, latents)
        start += query_len
    return (out,)


def latent_attention(dtype: torch.dtype) -> list[Case]:
    if INTERPRETED:  # a tile of keys takes 10 ms there
        return [
            latent_case([1, 1], [15, 33], (4, 32, 16), 16, dtype),
            latent_case([1, 5, 20], [70, 40, 20], (18, 24, 8), 16, dtype),
        ]
    return [
        latent_case([1], [1], (4, 32, 16), 16, dtype),
        latent_case([1, 1, 1], [15, 17, 700], (20, 64, 16), 16, dtype),
        latent_case([7], [100], (3, 24, 8), 8, dtype),
        latent_case([1, 2, 150], [900, 2, 700], (6, 40, 24), 32, dtype),
        latent_case([1, 3], [600, 90], (128, 512, 64), 16, dtype),
    ]


LATENT_OPS = {f.__name__: f for f in (pack_head_linear, store_latents, latent_attention)}
