"""Launches attention over the paged cache in Triton: it decides which rows go to which kernel, in
which shapes.

Must not know: models, requests.

The launch for decodes depends on shapes alone. It can be captured in a CUDA graph, padded with
requests of length 0, whose output is zero. The launch for longer queries has as many programs as
the host's lists of lengths ask for, which in a graph are the worst case; the device makes the list
of their work.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import Facts, register
from .attention_decode import MAX_PIECES, MIN_TILES, decode_kernel, merge_kernel
from .attention_divided import divided_decode_kernel
from .attention_pieces import SHARES, count_pieces, plan_kernel
from .attention_prefill import prefill_kernel
from .device import PRIORITY, architecture, dependent, num_multiprocessors, reads_cache
from .kv_cache import turned

MAX_HEAD_DIM = 512
# A decode step has enough programs to balance requests of different lengths and to keep loads in
# flight.
PROGRAMS_PER_MULTIPROCESSOR = 4


def has_triton_heads(facts: Facts) -> bool:
    return reads_cache(facts) and 0 < facts.head_dim <= MAX_HEAD_DIM


@register("paged_attention", name="triton", predicate=has_triton_heads, priority=PRIORITY)
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
    options = sliding_window, softcap, sinks, later
    return attend(query, key_cache, value_cache, metadata, scale, *options)


@register(
    "paged_attention", name="triton_two_launches", predicate=has_triton_heads, priority=PRIORITY - 1
)
def paged_attention_in_two_launches(
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
    """paged_attention with the decode states merged by a second launch. The results are bitwise
    equal.

    It avoids the synchronisation between programs of one launch that attention_decode describes.
    """
    return attend(
        query,
        key_cache,
        value_cache,
        metadata,
        scale,
        sliding_window,
        softcap,
        sinks,
        later,
        one_launch=False,
    )


@register(
    "paged_attention", name="triton_invariant", predicate=has_triton_heads, priority=PRIORITY - 2
)
def invariant_attention(
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
    """paged_attention, where a token has the same bits in any chunk of a prompt and as a decode."""
    options = sliding_window, softcap, sinks, later
    return attend(query, key_cache, value_cache, metadata, scale, *options, is_invariant=True)


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    later: Tensor | None = None,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    one_launch: bool = True,
    is_invariant: bool = False,
    num_programs: int | None = None,
) -> Tensor:
    """paged_attention's contract, with these extensions.

    Caches in float8_e4m3fn (sm_89 or newer) hold keys and values divided by key_scale and
    value_scale. softcap c > 0 replaces a logit x by c tanh(x / c). is_invariant: decodes and longer
    queries have tiles of one shape, and both fold the same pieces. num_programs is the number of
    programs per decode and KV head, or per KV head with is_invariant; if it is None, it is chosen
    to fill the GPU.
    """
    if min(scale, key_scale, value_scale) <= 0:
        raise ValueError(
            f"scale, key_scale and value_scale must be positive, not {scale}, {key_scale} and "
            f"{value_scale}"
        )
    if sliding_window < 0 or softcap < 0:
        raise ValueError(
            f"sliding_window and softcap must be at least 0, not {sliding_window} and {softcap}"
        )
    if key_cache.dtype == torch.float8_e4m3fn and architecture() < 89:
        raise ValueError(
            f"key_cache in {key_cache.dtype} needs sm_89 or newer, this GPU is sm_{architecture()}"
        )
    out = query.new_empty(query.shape)
    if key_cache.dtype == torch.int8:
        query = turned(query)
    cache = _cache_arguments(key_cache, value_cache, query.shape[2])
    options = {"WINDOW": sliding_window, "SOFTCAP": float(softcap), **_layout(query, key_cache)}
    # Fused multiply-adds are explicit, so that every kernel that inlines them gives the same bits.
    options["enable_fp_fusion"] = False
    options["SINKS"] = sinks is not None
    cache["sinks"] = query if sinks is None else sinks  # without SINKS it is not read
    scales = scale * key_scale, value_scale
    facts = options["GROUP"], options["BLOCK_D"], query.dtype, architecture()
    in_int8 = key_cache.dtype == torch.int8
    shape = (invariant_shape if is_invariant else prefill_shape)(*facts, in_int8)
    if metadata.num_decodes and is_invariant:
        _decode_divided(query, cache, metadata, scales, out, options | shape, num_programs)
    elif metadata.num_decodes:
        _decode(query, cache, metadata, scales, out, options, one_launch, num_programs)
    if metadata.num_decodes < len(metadata.query_lens):
        shape["PIECES"] = is_invariant
        _prefill(query, cache, metadata, scales, out, options | shape, later)
    return out


def _decode(
    query: Tensor,
    cache: dict[str, Any],
    metadata: AttentionMetadata,
    scales: tuple[float, float],
    out: Tensor,
    options: dict[str, Any],
    one_launch: bool,
    num_programs: int | None,
) -> None:
    num_requests, num_kv_heads = metadata.num_decodes, query.shape[1] // options["GROUP"]
    shape = {
        **options,
        **decode_shape(options["GROUP"], options["BLOCK_D"], query.dtype),
        "MIN_TILES": MIN_TILES,
        "MAX_PIECES": MAX_PIECES,
    }
    max_length = metadata.block_tables.shape[1] * options["BLOCK_SIZE"]
    max_pieces = min(MAX_PIECES, triton.cdiv(max_length, MIN_TILES * shape["TILE"]))
    wanted = triton.cdiv(
        PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(query.device), num_requests * num_kv_heads
    )
    num_programs = num_programs or min(max_pieces, wanted)
    scalars, sums, counters = _states_once(
        metadata, query, num_kv_heads, options["BLOCK_D"], MAX_PIECES, num_programs
    )
    decode_kernel[num_requests, num_kv_heads, num_programs](
        query,
        cache["key"],
        cache["value"],
        cache["sinks"],
        metadata.block_tables,
        metadata.seq_lens,
        out,
        scalars,
        sums,
        counters,
        *scales,
        num_programs,
        metadata.block_tables.stride(0),
        *query.stride()[:2],
        *cache["strides"],
        **shape,
        ONE_LAUNCH=one_launch,
        **dependent(),
    )
    if num_programs > 1 and not one_launch:
        names = (
            "GROUP",
            "ROWS",
            "HEAD_DIM",
            "BLOCK_D",
            "TILE",
            "MIN_TILES",
            "MAX_PIECES",
            "WINDOW",
            "enable_fp_fusion",
        )
        merge_kernel[num_requests, num_kv_heads](
            metadata.seq_lens,
            out,
            scalars,
            sums,
            scales[1],
            num_programs,
            **{name: shape[name] for name in names},
            num_warps=4,
        )


def _decode_divided(
    query: Tensor,
    cache: dict[str, Any],
    metadata: AttentionMetadata,
    scales: tuple[float, float],
    out: Tensor,
    shape: dict[str, Any],
    num_programs: int | None,
) -> None:
    num_kv_heads = query.shape[1] // shape["GROUP"]
    max_pieces = count_pieces(metadata.block_tables.shape[1] * shape["BLOCK_SIZE"])
    if num_programs is None:
        wanted = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(query.device)
        most = metadata.num_decodes * max_pieces
        num_programs = min(most, triton.cdiv(wanted, num_kv_heads))
    states = _states_once(metadata, query, num_kv_heads, shape["BLOCK_D"], max_pieces, num_programs)
    plan = _plan_once(metadata, num_programs, shape["TILE"], shape["WINDOW"])
    divided_decode_kernel[num_programs, num_kv_heads](
        query,
        cache["key"],
        cache["value"],
        cache["sinks"],
        metadata.block_tables,
        metadata.seq_lens,
        out,
        *states,
        plan,
        *scales,
        max_pieces,
        metadata.block_tables.stride(0),
        *query.stride()[:2],
        *cache["strides"],
        **shape,
    )


def _prefill(
    query: Tensor,
    cache: dict[str, Any],
    metadata: AttentionMetadata,
    scales: tuple[float, float],
    out: Tensor,
    shape: dict[str, Any],
    later: Tensor | None,
) -> None:
    """A decode sees no later token, since its own is the last of the context."""
    work = _work_once(metadata, shape["ROWS"] // shape["GROUP"], query.device)
    prefill_kernel[query.shape[1] // shape["GROUP"], len(work)](
        query,
        cache["key"],
        cache["value"],
        cache["sinks"],
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        work,
        work if later is None else later,  # without LATER it is not read
        out,
        *scales,
        query.shape[1],
        metadata.block_tables.stride(0),
        *query.stride()[:2],
        *cache["strides"],
        **shape,
        LATER=later is not None,
    )


def _cache_arguments(key_cache: Tensor, value_cache: Tensor, head_dim: int) -> dict[str, Any]:
    """Strides of blocks, slots and heads. The integers of an int8 block are contiguous: its scales
    stand behind them.
    """
    strides = (*key_cache.stride()[:3], *value_cache.stride()[:3])
    if key_cache.dtype == torch.int8:
        inner = key_cache.shape[2] * head_dim, head_dim
        strides = (key_cache.stride(0), *inner, value_cache.stride(0), *inner)
    return {"key": key_cache, "value": value_cache, "strides": strides}


def _layout(query: Tensor, key_cache: Tensor) -> dict[str, int]:
    head_dim = query.shape[2]
    block_d = max(16, triton.next_power_of_2(head_dim))
    return {
        "GROUP": query.shape[1] // key_cache.shape[2],
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_SIZE": key_cache.shape[1],
    }


# ---------------------------------------------------------------- launch shapes. They depend on
# static facts alone, so that a request's bits do not depend on its batch.


def decode_shape(group: int, block_d: int, dtype: torch.dtype) -> dict[str, int]:
    """One of the stages is used for the block-table look-up, so 5 keep two tiles in flight."""
    rows = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        stages = 3 if block_d <= 256 else 1
        tile = 32 if block_d <= 64 else 16
        return {"ROWS": rows, "TILE": tile, "num_warps": 4, "num_stages": stages}
    tile = 64 if block_d <= 128 else 32 if block_d <= 256 else 16
    warps = 4 if block_d <= 256 else 8
    return {"ROWS": rows, "TILE": tile, "num_warps": warps, "num_stages": 5}


def prefill_shape(
    group: int, block_d: int, dtype: torch.dtype, arch: int, in_int8: bool = False
) -> dict[str, int]:
    """A tile has at least 64 rows, with 4 warps per 64 rows, as wgmma requires.

    Before Hopper, a tile of 64 keys of 128 elements does not fit the registers, nor do 128 rows
    beside keys that are converted from integers. The sums of 64 rows
    of 512 elements never do: those tiles have 32 rows, without wgmma.
    """
    if dtype == torch.float32:
        rows, tile = 32 if block_d <= 128 else 16, 32 if block_d <= 64 else 16
        return {
            "ROWS": max(rows, triton.next_power_of_2(group)),
            "TILE": tile,
            "num_warps": 8,
            "num_stages": 2 if block_d <= 256 else 1,
        }
    rows = 128 if block_d <= 128 else 64 if block_d <= 256 else 32
    if in_int8 and arch < 90:
        rows = min(rows, 64)
    tile = 64 if block_d <= (128 if arch >= 90 else 64) else 32
    return {
        "ROWS": max(rows, triton.next_power_of_2(group)),
        "TILE": tile,
        "num_warps": 8,
        "num_stages": 3 if block_d <= 256 else 2,
    }


def invariant_shape(
    group: int, block_d: int, dtype: torch.dtype, arch: int, in_int8: bool = False
) -> dict[str, int]:
    """The shape of decodes and of longer queries, where both have the same bits: what a thread has
    of a row, and with that the order in which threads add, follows from it.

    It has half the rows of a prompt's shape, since two sums of a row must fit the registers, and a
    decode leaves most rows empty. Up to 128 elements these are the fewest that wgmma takes.
    """
    shape = prefill_shape(group, block_d, dtype, arch, in_int8)
    shape["ROWS"] = max(16, shape["ROWS"] // 2, triton.next_power_of_2(group))
    if dtype != torch.float32 and block_d <= 64:
        shape["num_warps"] = 4
    return shape


# ---------------------------------------------------------------- once per step


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _states_once(
    metadata: AttentionMetadata,
    query: Tensor,
    num_kv_heads: int,
    block_d: int,
    max_pieces: int,
    num_programs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns buffers for the states of programs that share a request, and counters, which start at
    0.

    Each layer's launch resets the counters to 0. A CUDA graph capture allocates its own buffers:
    those of the preceding run are freed with its metadata, and every replay must start from zeros.
    """
    is_captured = _is_captured(query)
    sizes = query.shape[1], num_kv_heads, block_d, max_pieces
    key = ("triton decode", *sizes, num_programs > 1, is_captured)
    if key not in metadata.scratch:
        # Otherwise the kernel takes the pointers but does not access them.
        num_requests, is_shared = metadata.num_decodes, num_programs > 1
        places = (num_requests, query.shape[1], max_pieces) if is_shared else (1,)
        scalars, sums = (
            query.new_empty((*places, size), dtype=torch.float32) for size in (2, block_d)
        )
        counters = query.new_empty((num_requests, num_kv_heads), dtype=torch.int32)
        metadata.scratch[key] = scalars, sums, counters.zero_() if is_shared else counters
    return metadata.scratch[key]


def _plan_once(metadata: AttentionMetadata, num_programs: int, tile: int, window: int) -> Tensor:
    """Returns what each program of a KV head has of the decodes' pieces, as plan_kernel writes it.
    The device makes it, from this step's lengths.
    """
    key = ("triton plan", num_programs, tile, window, _is_captured(metadata.seq_lens))
    if key not in metadata.scratch:
        plan = metadata.seq_lens.new_empty(num_programs + 1, 2)
        plan_kernel[(triton.cdiv(num_programs + 1, SHARES),)](
            metadata.seq_lens,
            plan,
            metadata.num_decodes,
            num_programs,
            REQUESTS=triton.next_power_of_2(metadata.num_decodes),
            TILE=tile,
            WINDOW=window,
            SHARES=SHARES,
        )
        metadata.scratch[key] = plan
    return metadata.scratch[key]


def _work_once(metadata: AttentionMetadata, block_tokens: int, device: torch.device) -> Tensor:
    """[items, 2] i32: a request, and the first token of a block of `block_tokens` of its query
    tokens.

    Later blocks of a request, which have longer contexts, come first, so that the program that
    starts last is short. The host's lists say how many items there are, and the device which. In a
    graph the lists are those that give the most items; items that a step has no block for are the
    first block of the last request, which is padding.
    """
    key = ("triton prefill", block_tokens)
    if key not in metadata.scratch:
        num_decodes = metadata.num_decodes
        num_items = sum(-(-length // block_tokens) for length in metadata.query_lens[num_decodes:])
        num_blocks = (metadata.query_start_loc[num_decodes:].diff() - 1) // block_tokens + 1
        ends = num_blocks.cumsum(0)
        item = torch.arange(num_items - 1, -1, -1, device=device)
        request = torch.searchsorted(ends, item, right=True).clamp_(max=len(num_blocks) - 1)
        block = item - (ends - num_blocks).index_select(0, request)
        first = torch.where(block < num_blocks.index_select(0, request), block * block_tokens, 0)
        work = torch.stack((request + num_decodes, first), 1)
        metadata.scratch[key] = work.to(torch.int32)
    return metadata.scratch[key]
