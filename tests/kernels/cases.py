"""Inputs for every operation, and the same operation in torch's own words, in any dtype: in fp64
the truth, in bf16 the yardstick.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from quire.kernels.ops import AttentionMetadata
from quire.kernels.reference import quantized
from quire.tests.kernels.triton.waiting import NothingWaits
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Triton's interpreter runs the kernels for GPUs on tensors in host memory; then they alone are
# tested (tests/kernels/triton/).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if INTERPRETED:
    from quire.tests.kernels.triton.guard import reachable
else:
    reachable = contextlib.nullcontext  # of tensors whose addresses a kernel reads from memory

FOREIGN_BLOCK = 2**30  # stands in block tables past a request's last block: following it would fail


@dataclass
class Case:
    """One call, and torch's own version of it."""

    name: str
    args: tuple[Any, ...]
    torch_own: Callable[..., tuple[Tensor, ...]]
    # indices of the arguments that the operation writes; its results are then those
    in_place: tuple[int, ...] = ()

    def run(self, function: Callable) -> tuple[Tensor, ...]:
        """Calls on copies; gives the results as a tuple."""
        args = copies(self.args)
        result = self.call(function, args)
        if self.in_place:
            assert result is None
            return tuple(args[i] for i in self.in_place)
        return result if isinstance(result, tuple) else (result,)

    def call(self, function: Callable, args: list[Any]) -> Any:
        return function(*args)

    def truth(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.torch_own(
            *(
                arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg
                for arg in self.args
            )
        )


def copies(args: tuple[Any, ...]) -> list[Any]:
    """Tensors with the same strides, views of one projection again views of one; metadata without
    its scratch; anything else as it is.
    """
    storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def copy(arg: Any) -> Any:
        if isinstance(arg, AttentionMetadata):
            return AttentionMetadata(
                **{
                    name: getattr(arg, name)
                    for name in arg.__dataclass_fields__
                    if name != "scratch"
                }
            )
        if not isinstance(arg, Tensor):
            return arg
        storage = arg.untyped_storage()
        key = storage.data_ptr(), arg.dtype  # empty ones are all at 0
        if key not in storages:
            storages[key] = arg.as_strided(
                (storage.nbytes() // arg.element_size(),), (1,), 0
            ).clone()
        return storages[key].as_strided(arg.shape, arg.stride(), arg.storage_offset())

    return [copy(arg) for arg in args]


def on_gpu(function: Callable) -> Callable:
    """An implementation for GPUs as a function of tensors in host memory: they go there, and what
    was written comes back. Fails if it reads a tensor: it would wait for the GPU.
    """
    names = list(inspect.signature(function).parameters)

    def call(*args: Any) -> Any:
        # storages, so that views of one stay views of one
        moved: dict[tuple[int, torch.dtype], Tensor] = {}
        back: list[tuple[Tensor, Tensor]] = []

        def move(value: Any) -> Any:
            if isinstance(value, list):
                return [move(item) for item in value]
            if isinstance(value, AttentionMetadata):
                return replace(
                    value,
                    **{
                        name: move(item)
                        for name, item in vars(value).items()
                        if isinstance(item, Tensor)
                    },
                )
            if not isinstance(value, Tensor):
                return value
            storage = value.untyped_storage()
            whole = value.as_strided((storage.nbytes() // value.element_size(),), (1,), 0)
            key = storage.data_ptr(), value.dtype  # empty ones are all at 0
            if key not in moved:
                moved[key] = whole.to(GPU, copy=True)
                back.append((whole, moved[key]))
            return moved[key].as_strided(value.shape, value.stride(), value.storage_offset())

        # copy_blocks has them on the host
        there = [arg if name == "pairs" else move(arg) for name, arg in zip(names, args)]
        with reachable([written for _, written in back]), NothingWaits():
            result = function(*there)
        for here, written in back:
            here.copy_(written)
        if callable(result):
            return on_gpu(result)
        return (
            tuple(r.cpu() for r in result)
            if isinstance(result, tuple)
            else result.cpu()
            if isinstance(result, Tensor)
            else result
        )

    return call


def rand(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def embedding(dtype: torch.dtype) -> list[Case]:
    def own(token_ids: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return (table[token_ids.long()],)

    def case(num_tokens: int, size: int, index_dtype: torch.dtype) -> Case:
        token_ids = torch.randint(0, 50, (num_tokens,), dtype=index_dtype)
        return Case(
            f"{num_tokens} x {size}, {index_dtype}", (token_ids, rand(50, size, dtype=dtype)), own
        )

    return [
        case(1, 64, torch.int32),
        case(70, 100, torch.int32),
        case(9, 896, torch.int64),
        case(3, 1, torch.int64),
        case(0, 8, torch.int32),
    ]


def gather_rows(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        return (x[indices],)

    wide = rand(40, 256, dtype=dtype)
    return [
        Case("last tokens", (rand(100, 96, dtype=dtype), torch.tensor([0, 40, 41, 99])), own),
        Case("strided", (wide[:, 100:], torch.tensor([39, 3, 3])), own),
        Case("none", (wide, torch.zeros(0, dtype=torch.int64)), own),
    ]


def pack_linear(dtype: torch.dtype) -> list[Case]:
    """The weight is packed, then x multiplied."""

    class Packed(Case):
        def call(self, function: Callable, args: list[Any]) -> Tensor:
            with torch.inference_mode():
                return function(*args[1:])(args[0])

    def own(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        return (F.linear(x, weight, bias),)

    def case(num_tokens: int, in_features: int, out_features: int, bias: bool) -> Case:
        weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
        args = (
            rand(num_tokens, in_features, dtype=dtype),
            weight,
            rand(out_features, dtype=dtype) if bias else None,
        )
        return Packed(f"{num_tokens} x {in_features} x {out_features}{' + bias' * bias}", args, own)

    shapes = [(1, 64, 96), (5, 64, 96), (70, 64, 96), (1, 896, 1152), (3, 200, 33), (33, 384, 17)]
    return [case(*shape, bias) for shape in shapes for bias in (False, True)]


def pack_quantized_linear(dtype: torch.dtype) -> list[Case]:
    """Against the same whole numbers, multiplied in another precision: how far these are from the
    weights is tested elsewhere.
    """

    class Packed(Case):
        def call(self, function: Callable, args: list[Any]) -> Tensor:
            with torch.inference_mode():
                return function(*args[1:])(args[0])

    def own(x: Tensor, weight: Tensor, bias: Tensor | None, bits: int) -> tuple[Tensor, ...]:
        quantize = quantized.quantize_int8 if bits == 8 else quantized.quantize_int4
        group = quantized.GROUP[bits]
        pairs = (
            quantized.quantize_activations(quantized.in_groups(x.float(), group)),
            quantize(quantized.in_groups(weight.float(), group)),
        )
        values, weights = (
            (numbers.double() * scales.double().unsqueeze(-1)).flatten(1)
            for numbers, scales in pairs
        )
        return ((values @ weights.T + (0 if bias is None else bias.double())).to(x.dtype),)

    def case(num_tokens: int, in_features: int, out_features: int, bits: int, bias: bool) -> Case:
        weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype)
        args = (
            rand(num_tokens, in_features, dtype=dtype),
            weight,
            rand(out_features, dtype=dtype) if bias else None,
            bits,
        )
        return Packed(
            f"{bits} bits, {num_tokens} x {in_features} x {out_features}{' + bias' * bias}",
            args,
            own,
        )

    shapes = [
        (1, 64, 96),
        (5, 64, 96),
        (70, 64, 96),
        (1, 896, 80),
        (3, 200, 33),
        (19, 320, 17),
        (0, 64, 32),
    ]
    return [
        case(*shape, bits, bias) for shape in shapes for bits in (8, 4) for bias in (False, True)
    ]


def rms_norm(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        return (F.rms_norm(x, weight.shape, weight, eps),)

    shapes = [(1, 128), (3, 896), (33, 100), (2, 1), (5, 2, 64)]
    cases = [
        Case(f"{shape}", (rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype), 1e-6), own)
        for shape in shapes
    ]
    strided = rand(7, 6, 64, dtype=dtype)[:, 2:4]  # the key heads of one projection
    cases.append(Case("strided heads", (strided, rand(64, dtype=dtype), 1e-5), own))
    return [*cases, Case("empty", (rand(0, 8, dtype=dtype), rand(8, dtype=dtype), 1e-6), own)]


def fused_add_rms_norm(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, eps), total

    shapes = [(1, 128), (3, 896), (33, 100)]
    return [
        Case(
            f"{shape}",
            (
                rand(*shape, dtype=dtype),
                rand(*shape, dtype=dtype),
                rand(shape[-1], dtype=dtype),
                1e-6,
            ),
            own,
            in_place=(0, 1),
        )
        for shape in shapes
    ]


def silu_and_mul(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor) -> tuple[Tensor, ...]:
        gate, up = x.chunk(2, -1)
        return (F.silu(gate) * up,)

    return [
        Case(f"{shape}", (rand(*shape, dtype=dtype) * 3,), own)
        for shape in [(1, 2), (1, 352), (37, 96), (4, 9728)]
    ]


def rotary_embedding(dtype: torch.dtype) -> list[Case]:
    def own(positions: Tensor, query: Tensor, key: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        """transformers' apply_rotary_pos_emb"""
        cos, sin = (
            half.to(query.dtype).repeat(1, 2)[:, None] for half in cache[positions].chunk(2, -1)
        )

        def rotate(x: Tensor) -> Tensor:
            x, rest = x[..., : cache.shape[1]], x[..., cache.shape[1] :]
            first, second = x.chunk(2, -1)
            return torch.cat((x * cos + torch.cat((-second, first), -1) * sin, rest), -1)

        return rotate(query), rotate(key)

    def case(
        tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, layout: str
    ) -> Case:
        angles = torch.arange(512)[:, None] * 0.01 ** torch.linspace(0, 1, rotary_dim // 2)
        # rounded beforehand: truth in fp64 has the same rotations
        cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype).float()
        positions = torch.randint(0, 512, (tokens,))
        qkv = rand(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if layout == "apart":
            query, key = query.clone(), key.clone()
        elif layout == "key later":
            key = value
        return Case(
            f"{tokens} tokens {heads}/{kv_heads} x {head_dim} {layout}",
            (positions, query, key, cache),
            own,
            in_place=(1, 2),
        )

    return [
        case(1, 4, 2, 64, 64, "joined"),
        case(9, 14, 2, 64, 64, "joined"),
        case(1, 2, 2, 8, 8, "apart"),
        case(1, 1, 1, 2, 2, "apart"),
        case(5, 4, 1, 16, 8, "joined"),
        case(6, 4, 2, 16, 16, "key later"),
        case(3, 3, 3, 32, 16, "apart"),
    ]


def reshape_and_cache(dtype: torch.dtype) -> list[Case]:
    def own(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        kept = slots >= 0
        caches = key_cache.clone(), value_cache.clone()
        for cache, new in zip(caches, (key, value)):
            cache.flatten(0, 1)[slots[kept]] = new[kept]
        return caches

    def case(name: str, slots: Tensor) -> Case:
        qkv = rand(len(slots), 8, 16, dtype=dtype)
        caches = rand(10, 8, 2, 16, dtype=dtype), rand(10, 8, 2, 16, dtype=dtype)
        return Case(name, (qkv[:, 4:6], qkv[:, 6:8], *caches, slots), own, in_place=(2, 3))

    holes = torch.randperm(80)[:30]
    holes[::4] = -1
    return [
        case("one", torch.tensor([37])),
        case("scattered", torch.randperm(80)[:50]),
        case("holes", holes),
        case("none stored", torch.tensor([-1, -1])),
        case("empty", torch.zeros(0, dtype=torch.int64)),
    ]


def fused_qk_rope_reshape_and_cache(dtype: torch.dtype) -> list[Case]:
    def own(
        positions: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        """transformers' Qwen3Attention, as far as its rotation, and index_put_"""
        angles, key_cache, value_cache, slots, query_norm, key_norm, eps = rest
        cos, sin = (
            half.to(query.dtype).repeat(1, 2)[:, None] for half in angles[positions].chunk(2, -1)
        )

        def turn(x: Tensor, weight: Tensor | None) -> Tensor:
            if weight is not None:
                x = F.rms_norm(x, weight.shape, weight, eps)
            x, rest = x[..., : angles.shape[1]], x[..., angles.shape[1] :]
            first, second = x.chunk(2, -1)
            return torch.cat((x * cos + torch.cat((-second, first), -1) * sin, rest), -1)

        kept = slots >= 0
        caches = key_cache.clone(), value_cache.clone()
        for cache, new in zip(caches, (turn(key, key_norm), value)):
            cache.flatten(0, 1)[slots[kept]] = new[kept]
        return turn(query, query_norm), *caches

    def case(
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        norm: bool,
        joined: bool = True,
    ) -> Case:
        angles = torch.arange(512)[:, None] * 0.01 ** torch.linspace(0, 1, rotary_dim // 2)
        # rounded beforehand, as for rotary_embedding
        angles = torch.cat((angles.cos(), angles.sin()), -1).to(dtype).float()
        query, key, value = rand(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype).split(
            (heads, kv_heads, kv_heads), dim=1
        )
        if not joined:
            query, key, value = query.clone(), key.clone(), value.clone()
        caches = (
            rand(6, 8, kv_heads, head_dim, dtype=dtype),
            rand(6, 8, kv_heads, head_dim, dtype=dtype),
        )
        slots = torch.randperm(48)[:tokens]
        slots[1::3] = -1
        norms = (
            (rand(head_dim, dtype=dtype), rand(head_dim, dtype=dtype), 1e-6)
            if norm
            else (None, None, 0.0)
        )
        args = torch.randint(0, 512, (tokens,)), query, key, value, angles, *caches, slots, *norms
        name = f"{tokens} tokens {heads}/{kv_heads} x {head_dim}, {rotary_dim} rotated{', norms' * norm}"
        return Case(name, args, own, in_place=(1, 5, 6))

    return [
        case(1, 4, 2, 64, 64, False),
        case(9, 14, 2, 64, 64, False),
        case(4, 16, 8, 128, 128, True),
        case(3, 3, 1, 24, 24, True, False),
        case(7, 4, 2, 32, 16, True),
        case(5, 2, 2, 40, 10, False, False),
        case(2, 40, 20, 8, 8, True),
        case(0, 4, 2, 16, 16, True),
    ]


def copy_blocks(dtype: torch.dtype) -> list[Case]:
    class Copies(Case):
        """args: pairs, then sources and destinations in turn"""

        def call(self, function: Callable, args: list[Any]) -> None:
            pairs, *caches = args
            function(caches[::2], caches[1::2], pairs)

    def own(pairs: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        results = []
        for source, destination in zip(caches[::2], caches[1::2]):
            copied = destination.clone()
            copied[pairs[:, 1]] = source[pairs[:, 0]]
            results += [copied if source.equal(destination) else source, copied]
        return tuple(results)

    def case(name: str, pairs: list[tuple[int, int]], *caches: Tensor) -> Case:
        index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        return Copies(name, (index, *caches), own, in_place=tuple(range(1, 1 + len(caches))))

    def blocks(num_blocks: int, *shape: int) -> list[Tensor]:
        return [rand(num_blocks, *(shape or (8, 2, 16)), dtype=dtype) for _ in range(4)]

    caches, hosts, odd, large = blocks(10), blocks(6), blocks(4, 3, 1, 5), blocks(3, 16, 4, 128)
    joined = torch.stack(caches)
    return [
        case(
            "within the caches",
            [(3, 4), (3, 0), (9, 2)],
            *(cache for cache in caches for _ in range(2)),
        ),
        case(
            "out",
            [(9, 0), (1, 5), (1, 2)],
            *(cache for pair in zip(caches, hosts) for cache in pair),
        ),
        case("in", [(5, 7)], *(cache for pair in zip(hosts, caches) for cache in pair)),
        case("nothing", [], hosts[0], caches[0]),
        case("odd sizes", [(1, 0), (3, 2)], odd[0], odd[1]),
        case("views of one tensor", [(0, 3), (9, 1)], joined[0], joined[0], joined[2], joined[2]),
        case("large blocks", [(2, 0)], large[0], large[1], large[2], large[3]),
    ]


def make_metadata(
    query_lens: list[int], seq_lens: list[int], block_size: int, num_blocks: int
) -> AttentionMetadata:
    """Pages handed out in random order; rows with one query token must come first."""
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


def attention_case(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    *options: Any,
) -> Case:
    """heads: (NQ, NKV, D); options: sliding_window and softcap, where there are any.

    Every slot that no request owns holds NaN.
    """
    num_heads, num_kv_heads, head_dim = heads
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 3
    metadata = make_metadata(query_lens, seq_lens, block_size, num_blocks)
    key_cache, value_cache = (
        torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), math.nan)
        .to(dtype)
        .unbind(0)
    )
    for row in range(len(seq_lens)):
        where = context_slots(metadata, row, block_size)
        for cache in (key_cache, value_cache):
            cache[where] = rand(seq_lens[row], num_kv_heads, head_dim, dtype=dtype)
    query = rand(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)[
        :, :num_heads
    ]
    batch = (
        f"queries {query_lens} of {seq_lens}" if len(seq_lens) < 6 else f"{len(seq_lens)} requests"
    )
    name = f"{batch}, {heads}, blocks of {block_size}, {options}"
    return Case(
        name, (query, key_cache, value_cache, metadata, head_dim**-0.5, *options), attention_own
    )


def attention_own(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
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
        q = query[start : start + query_len].transpose(0, 1)
        if softcap:  # transformers' Gemma 2
            logits = (q @ keys.mT * scale / softcap).tanh() * softcap
            attended = logits.masked_fill(~mask, -math.inf).softmax(-1) @ values
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
            attention_case([1, 1, 1], [15, 1, 33], bundled, 16, dtype),
            attention_case([1, 1, 7, 80], [300, 3, 100, 80], (4, 1, 32), 16, dtype),
            attention_case([1, 9], [150, 100], (4, 2, 32), 16, dtype, 40, 3.0),
        ]
    ragged = [50 + i for i in range(31)] + [1500]
    return [
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
    ]


MODEL_OPS = {
    f.__name__: f
    for f in (
        embedding,
        gather_rows,
        pack_linear,
        pack_quantized_linear,
        rms_norm,
        fused_add_rms_norm,
        silu_and_mul,
        rotary_embedding,
        reshape_and_cache,
        fused_qk_rope_reshape_and_cache,
        copy_blocks,
        paged_attention,
    )
}
SAMPLING_OPS = (
    "apply_grammar_bitmask",
    "apply_penalties",
    "argmax",
    "sample_tokens",
    "random_gumbel",
    "gather_logprobs",
)
