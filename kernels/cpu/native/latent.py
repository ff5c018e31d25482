"""Implements multi-head latent attention by the native library.

Must not know: models, requests.
"""

from __future__ import annotations

from torch import Tensor

from ...ops import AttentionMetadata
from ...registry import Facts, register
from .calls import Attention, Epilogue, HeadsLinear, Op, Step, WriteLatents
from .library import library
from .program import empty, run_call
from .tensors import CACHE_DTYPES, DTYPES, PRIORITY, has_native_cache, is_native
from .weights import empty_weight

MAX_ROW = 576  # elements of a token in the cache (src/kv_cache.inl: MAX_HEAD_DIM)
# Query heads of a token that are an item of work. More would leave threads idle, fewer would read a
# tile of keys more often.
_MOST_HEADS = 32
_PANEL = 16  # outputs whose weights are stored together (src/abi.h: quire_pack_linear)


def has_native_latents(facts: Facts) -> bool:
    """facts.head_dim is the size of a token in the cache."""
    return has_native_cache(facts) and 0 < facts.head_dim <= MAX_ROW and facts.head_dim % 8 == 0


class PackedHeads:
    """A bf16 or fp32 matrix for each head, which does not change."""

    def __init__(self, weight: Tensor):
        """weight [heads, out, in]; it is copied."""
        self.heads, self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        per_line = 4 // self.dtype.itemsize
        panels, lines = -(-self.out_features // _PANEL), -(-self.in_features // per_line)
        self.weight = empty_weight(self.heads, panels, lines, _PANEL, per_line, dtype=self.dtype)
        for rows, packed in zip(weight.contiguous(), self.weight):
            library.pack_linear(
                rows.data_ptr(),
                rows.stride(0),
                DTYPES[self.dtype],
                self.out_features,
                self.in_features,
                packed.data_ptr(),
            )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, heads, in] -> [T, heads, out]"""
        out = empty(x.shape[0], self.heads, self.out_features, dtype=self.dtype)
        run_call(
            HeadsLinear,
            Op.HEADS_LINEAR,
            x,
            x=x,
            weight=self.weight,
            bias=None,
            out=out,
            in_features=self.in_features,
            out_features=self.out_features,
            epilogue=Epilogue.PLAIN,
            out_dtype=DTYPES[self.dtype],
            gate_scale=0.0,
            gate_limit=0.0,
            head_bytes=self.weight[0].nbytes,
            heads=self.heads,
        )
        return out


@register("pack_head_linear", name="native", predicate=is_native, priority=PRIORITY)
def pack_head_linear(weight: Tensor) -> PackedHeads:
    return PackedHeads(weight)


@register("store_latents", name="native", predicate=has_native_latents, priority=PRIORITY)
def store_latents(latent: Tensor, rotary_key: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    run_call(
        WriteLatents,
        Op.WRITE_LATENTS,
        latent,
        Step(num_tokens=latent.shape[0], slot_mapping=slot_mapping.data_ptr()),
        latent=latent,
        key=rotary_key,
        cache=cache,
        rank=latent.shape[1],
        rotary_dim=rotary_key.shape[1],
        group=0,  # that the slots are of; the recorder knows others
    )


@register("latent_attention", name="native", predicate=has_native_latents, priority=PRIORITY)
def latent_attention(
    query: Tensor,
    rotary_query: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> Tensor:
    num_tokens, heads, rank = query.shape
    out = empty(num_tokens, heads, rank, dtype=query.dtype)
    step = Step(
        num_tokens=num_tokens,
        num_requests=metadata.seq_lens.shape[0],
        query_start_loc=metadata.query_start_loc.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        block_tables=metadata.block_tables.data_ptr(),
        block_table_row=metadata.block_tables.stride(0),
    )
    run_call(
        Attention,
        Op.ATTENTION,
        query,
        step,
        query=query,
        key_cache=cache,
        value_cache=cache,
        out=out,
        heads=heads,
        kv_heads=1,
        head_dim=cache.shape[3],
        block_size=cache.shape[1],
        cache_block=cache.stride(0),
        sliding_window=0,
        cache_dtype=CACHE_DTYPES[cache.dtype],
        group=0,  # as in store_latents
        scale=scale,
        softcap=0.0,
        sinks=None,
        rotary_query=rotary_query,
        value_dim=rank,
        head_parts=_parts(heads),
        sees_later=False,
    )
    return out


def _parts(heads: int) -> int:
    """The smallest number of equal parts of at most _MOST_HEADS heads."""
    return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= _MOST_HEADS)
