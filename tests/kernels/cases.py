"""Inputs for every operation, and the same operation written with torch in any dtype: fp64 gives
the expected result, bf16 the error to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from quire.kernels.reference import gguf_linear, quantized
from quire.kernels.reference.gguf_blocks import dequantize
from quire.tests.kernels.altup_cases import ALTUP_OPS
from quire.tests.kernels.attention_cases import paged_attention
from quire.tests.kernels.case import INTERPRETED, Case, rand, random_blocks
from quire.tests.kernels.encoder_cases import ENCODER_OPS
from quire.tests.kernels.image_cases import IMAGE_OPS
from quire.tests.kernels.latent_cases import LATENT_OPS
from quire.tests.kernels.lora_cases import LORA_OPS
from quire.tests.kernels.moe_cases import add_gated, fused_moe
from quire.tests.kernels.state_rows_cases import STATE_ROW_OPS
from torch import Tensor


def embedding(dtype: torch.dtype) -> list[Case]:
    def own(token_ids: Tensor, table: Tensor, *first_if_absent: bool) -> tuple[Tensor, ...]:
        rows = [id if id < len(table) else 0 for id in token_ids.tolist()]
        return (table[rows],)

    def case(num_tokens: int, size: int, index_dtype: torch.dtype) -> Case:
        token_ids = torch.randint(0, 50, (num_tokens,), dtype=index_dtype)
        return Case(
            f"{num_tokens} x {size}, {index_dtype}", (token_ids, rand(50, size, dtype=dtype)), own
        )

    beyond = [
        Case(
            f"beyond, {kind}", (torch.tensor([49, 3, 50, 70, 0, 51], dtype=kind), table, True), own
        )
        for kind in (torch.int32, torch.int64)
        for table in [rand(50, 24, dtype=dtype)]
    ]
    return [
        case(1, 64, torch.int32),
        case(70, 100, torch.int32),
        case(9, 896, torch.int64),
        case(3, 1, torch.int64),
        case(0, 8, torch.int32),
        *beyond,
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
    """Packs the weight, then multiplies x."""

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
    """Multiplies the same integers in another precision. Their distance from the weights is tested
    in tests/kernels/native/test_quantized.py.
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
    if INTERPRETED:
        shapes = [(3, 600, 33)]
    return [
        case(*shape, bits, bias) for shape in shapes for bits in (8, 4) for bias in (False, True)
    ]


def pack_gguf_linear(dtype: torch.dtype) -> list[Case]:
    """Multiplies the dequantized blocks and the quantized x in another precision."""

    class Packed(Case):
        def call(self, function: Callable, args: list[Any]) -> Tensor:
            with torch.inference_mode():
                return function(*args[1:])(args[0])

    def own(
        x: Tensor, parts: list[Tensor], types: list[str], bias: Tensor | None, _: torch.dtype
    ) -> tuple[Tensor, ...]:
        numbers, scales = quantized.quantize_activations(
            quantized.in_groups(x.float(), gguf_linear.GROUP)
        )
        values = (numbers.double() * scales.double().unsqueeze(-1)).flatten(1)[:, : x.shape[1]]
        weights = torch.cat([dequantize(*part) for part in zip(parts, types, strict=True)]).double()
        return ((values @ weights.T + (0 if bias is None else bias.double())).to(x.dtype),)

    def case(num_tokens: int, in_features: int, rows: dict[str, int], bias: bool) -> Case:
        parts = [random_blocks(n, in_features, type) for type, n in rows.items()]
        args = (
            rand(num_tokens, in_features, dtype=dtype),
            parts,
            list(rows),
            rand(sum(rows.values()), dtype=dtype) if bias else None,
            dtype,
        )
        return Packed(f"{num_tokens} x {in_features} x {rows}{' + bias' * bias}", args, own)

    if INTERPRETED:  # all types are in tests/kernels/triton/interpreted/test_blocks.py
        return [case(3, 256, {"Q4_K": 16, "Q8_0": 17}, True), case(0, 256, {"Q8_0": 32}, False)]
    return [
        *(
            case(tokens, in_features, {type: out}, bias)
            for type in gguf_linear.TYPES
            for tokens, in_features, out, bias in ((1, 256, 96, False), (19, 768, 33, True))
        ),
        case(7, 512, {"Q4_K": 32, "Q6_K": 17, "Q8_0": 16}, True),
        case(0, 256, {"Q8_0": 32}, False),
    ]


def rms_norm(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        return (F.rms_norm(x, weight.shape, weight, eps),)

    shapes = [(1, 128), (3, 896), (33, 100), (2, 1), (5, 2, 64)]
    cases = [
        Case(f"{shape}", (rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype), 1e-6), own)
        for shape in shapes
    ]
    cases += [
        Case(
            f"{shape}, fp32 weight", (rand(*shape, dtype=dtype), torch.randn(shape[-1]), 1e-6), own
        )
        for shape in shapes[1:]
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
                rand(shape[-1], dtype=weight_dtype),
                1e-6,
            ),
            own,
            in_place=(0, 1),
        )
        for shape in shapes
        for weight_dtype in dict.fromkeys((dtype, torch.float32))
    ]


def scale(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, factor: float) -> tuple[Tensor, ...]:
        return (x * factor,)

    wide = rand(5, 80, dtype=dtype)[:, 3:70]
    return [
        *(
            Case(f"{shape}", (rand(*shape, dtype=dtype), factor), own, in_place=(0,))
            for shape, factor in [((1, 2), 0.22), ((33, 100), -3.0), ((4, 2048), 25.25)]
        ),
        Case("strided", (wide, 1e-3), own, in_place=(0,)),
    ]


def add(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return (residual + x,)

    wide = rand(5, 80, dtype=dtype)[:, 3:70]
    return [
        *(
            Case(
                f"{shape}",
                (rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)),
                own,
                in_place=(1,),
            )
            for shape in [(1, 2), (33, 100), (4, 2048)]
        ),
        Case("strided", (rand(5, 67, dtype=dtype), wide), own, in_place=(1,)),
    ]


def silu_and_mul(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor) -> tuple[Tensor, ...]:
        gate, up = x.chunk(2, -1)
        return (F.silu(gate) * up,)

    return [
        Case(f"{shape}", (rand(*shape, dtype=dtype) * 3,), own)
        for shape in [(1, 2), (1, 352), (37, 96), (4, 9728)]
    ]


def gelu_tanh_and_mul(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor) -> tuple[Tensor, ...]:
        gate, up = x.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") * up,)

    return [
        Case(f"{shape}", (rand(*shape, dtype=dtype) * 3,), own)
        for shape in [(1, 2), (1, 352), (37, 96), (4, 9728)]
    ]


def rotary_embedding_interleaved(dtype: torch.dtype) -> list[Case]:
    """The cases of rotary_embedding, as transformers' apply_rotary_pos_emb_interleave: it turns
    pairs into halves.
    """

    def own(positions: Tensor, query: Tensor, key: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        size = cache.shape[1]

        def in_halves(x: Tensor) -> Tensor:
            halves = x[..., :size].unflatten(-1, (-1, 2)).mT.flatten(-2)
            return torch.cat((halves, x[..., size:]), -1)

        def in_pairs(x: Tensor) -> Tensor:
            pairs = x[..., :size].unflatten(-1, (2, -1)).mT.flatten(-2)
            return torch.cat((pairs, x[..., size:]), -1)

        rotated = case.torch_own(positions, in_halves(query), in_halves(key), cache)
        return in_pairs(rotated[0]), in_pairs(rotated[1])

    found = rotary_embedding(dtype)
    case = found[0]
    return [Case(one.name, one.args, own, one.in_place) for one in found]


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
        # rounded in advance, so that fp64 has the same rotations
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

    def case(name: str, slots: Tensor, is_apart: bool = False) -> Case:
        qkv = rand(len(slots), 8, 16, dtype=dtype)
        caches = rand(10, 8, 2, 16, dtype=dtype), rand(10, 8, 2, 16, dtype=dtype)
        if is_apart:  # other memory lies between the blocks of a cache
            caches = torch.stack(caches, 1).unbind(1)
        return Case(name, (qkv[:, 4:6], qkv[:, 6:8], *caches, slots), own, in_place=(2, 3))

    holes = torch.randperm(80)[:30]
    holes[::4] = -1
    return [
        case("one", torch.tensor([37])),
        case("scattered", torch.randperm(80)[:50]),
        case("holes", holes),
        case("apart", torch.randperm(80)[:50], is_apart=True),
        case("none stored", torch.tensor([-1, -1])),
        case("empty", torch.zeros(0, dtype=torch.int64)),
    ]


def fused_qk_rope_reshape_and_cache(dtype: torch.dtype) -> list[Case]:
    def own(
        positions: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        """transformers' Qwen3Attention up to its rotation, and index_put_"""
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
        is_apart: bool = False,
    ) -> Case:
        angles = torch.arange(512)[:, None] * 0.01 ** torch.linspace(0, 1, rotary_dim // 2)
        # rounded in advance, as for rotary_embedding
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
        if is_apart:  # other memory lies between the blocks of a cache
            caches = torch.stack(caches, 1).unbind(1)
        slots = torch.randperm(48)[:tokens]
        slots[1::3] = -1
        norms = (
            (rand(head_dim, dtype=dtype), rand(head_dim, dtype=dtype), 1e-6)
            if norm
            else (None, None, 0.0)
        )
        args = torch.randint(0, 512, (tokens,)), query, key, value, angles, *caches, slots, *norms
        name = f"{tokens} tokens {heads}/{kv_heads} x {head_dim}, {rotary_dim} rotated"
        name += ", norms" * norm
        return Case(name, args, own, in_place=(1, 5, 6))

    return [
        case(1, 4, 2, 64, 64, False),
        case(9, 14, 2, 64, 64, False),
        case(4, 16, 8, 128, 128, True),
        case(3, 3, 1, 24, 24, True, False),
        case(7, 4, 2, 32, 16, True),
        case(5, 2, 2, 40, 10, False, False),
        case(2, 40, 20, 8, 8, True),
        case(3, 4, 2, 512, 512, True, is_apart=True),
        case(0, 4, 2, 16, 16, True),
    ]


def copy_blocks(dtype: torch.dtype) -> list[Case]:
    class Copies(Case):
        """args: pairs, then sources and destinations alternately"""

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


MODEL_OPS = (
    {
        f.__name__: f
        for f in (
            embedding,
            gather_rows,
            pack_linear,
            pack_quantized_linear,
            pack_gguf_linear,
            rms_norm,
            fused_add_rms_norm,
            silu_and_mul,
            gelu_tanh_and_mul,
            scale,
            add,
            add_gated,
            fused_moe,
            rotary_embedding,
            rotary_embedding_interleaved,
            reshape_and_cache,
            fused_qk_rope_reshape_and_cache,
            copy_blocks,
            paged_attention,
        )
    }
    | ALTUP_OPS
    | ENCODER_OPS
    | IMAGE_OPS
    | LATENT_OPS
    | LORA_OPS
    | STATE_ROW_OPS
)
SAMPLING_OPS = (
    "apply_grammar_bitmask",
    "apply_penalties",
    "argmax",
    "change_logits",
    "choose_tokens",
    "sample_tokens",
    "random_gumbel",
    "gather_logprobs",
    "spread_logits",
    "soft_cap",
)
# tests/kernels/test_moe.py
ROUTING_OPS = (
    "route_experts",
    "count_experts",
    "expert_outputs",
    "weighted_sum",
    "scale_by_expert",
)
