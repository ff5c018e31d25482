"""Implements attention by the native library, over the paged KV cache and of text encoders.

Must not know: models, requests.
"""

from torch import Tensor

from ...ops import AttentionMetadata
from ...registry import Facts, register
from .calls import Attention, EncoderAttention, Op, Step
from .program import empty, run_call
from .tensors import CACHE_DTYPES, MAX_HEAD_DIM, PRIORITY, has_native_cache, is_native

MAX_ENCODER_HEAD_DIM = 256  # see src/attention_encoder.inl


def has_native_heads(facts: Facts) -> bool:
    is_size = 0 < facts.head_dim <= MAX_HEAD_DIM and facts.head_dim % 8 == 0
    return has_native_cache(facts) and is_size


def has_native_encoder_heads(facts: Facts) -> bool:
    is_size = 0 < facts.head_dim <= MAX_ENCODER_HEAD_DIM and facts.head_dim % 8 == 0
    return is_native(facts) and is_size


@register("paged_attention", name="native", predicate=has_native_heads, priority=PRIORITY)
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
    out = empty(*query.shape, dtype=query.dtype)
    step = Step(
        num_tokens=query.shape[0],
        num_requests=metadata.seq_lens.shape[0],
        query_start_loc=metadata.query_start_loc.data_ptr(),
        later_tokens=None if later is None else later.data_ptr(),
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
        key_cache=key_cache,
        value_cache=value_cache,
        out=out,
        heads=query.shape[1],
        kv_heads=key_cache.shape[2],
        head_dim=query.shape[2],
        block_size=key_cache.shape[1],
        cache_block=key_cache.stride(0),
        sliding_window=sliding_window,
        cache_dtype=CACHE_DTYPES[key_cache.dtype],
        group=0,  # that `metadata` is of; the recorder knows others
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        rotary_query=None,
        rotary_query_row=0,
        rotary_query_head=0,
        value_dim=query.shape[2],
        head_parts=1,
        sees_later=later is not None,
    )
    return out


@register("encoder_attention", name="native", predicate=has_native_encoder_heads, priority=PRIORITY)
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    out = empty(*query.shape, dtype=query.dtype)
    step = Step(
        num_tokens=query.shape[0],
        num_requests=metadata.seq_lens.shape[0],
        query_start_loc=metadata.query_start_loc.data_ptr(),
    )
    run_call(
        EncoderAttention,
        Op.ENCODER_ATTENTION,
        query,
        step,
        query=query,
        key=key,
        value=value,
        bias=bias,
        out=out,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[2],
        window=window,
        bias_distance=0 if bias is None else bias.shape[1] // 2,
        is_whole=False,  # the recorder knows better
        scale=scale,
    )
    return out
