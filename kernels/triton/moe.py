"""Implements mixtures of experts in Triton: routing, pairs of token and expert in tiles of one
expert each, and the sum of what experts return. Their products are in expert_products.py.

Must not know: models, requests.

The tiles are as many as any choice of experts may need, so that grids depend on shapes alone; those
that are not needed do nothing. Every tile has the same number of rows, so the bits of a row do not
depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..moe import Experts
from ..registry import register
from .device import PLAIN, PRIORITY, TILE, is_cuda
from .expert_products import ROWS, Tiles, multiply, tables_of

PAIRS, TILES = 128, 128  # pairs, and tiles, per step of align_kernel
LOWEST = tl.constexpr(-3.0e38)  # a choice that is less than any, but not taken


@triton.jit(do_not_specialize=["scale", "added"])
def route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    row_stride,
    scale,
    added,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """A program routes one token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < COUNT
    logits = tl.load(logits_ptr + token * row_stride + expert, mask=inside, other=float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
    choice = logits  # in the order of scores, without ties by rounding
    if HAS_BIAS:
        choice = scores + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    elif GROUPS > 1:
        choice = scores
    choice = tl.where(choice == choice, tl.maximum(choice, LOWEST), LOWEST)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        group_of = expert // (COUNT // GROUPS)
        kept = tl.zeros([BLOCK], tl.int1)
        sums = tl.full([BLOCK], float("-inf"), tl.float32)  # of groups
        for group in range(GROUPS):
            mine = tl.where(group_of == group, choice, float("-inf"))
            total = tl.max(mine, 0)
            if GROUP_BEST == 2:
                first = tl.argmax(mine, 0)
                total += tl.max(tl.where(expert == first, float("-inf"), mine), 0)
            sums = tl.where(expert == group, total, sums)
        for _ in range(TOP_GROUPS):
            best = tl.argmax(sums, 0)
            kept = kept | (group_of == best)
            sums = tl.where(expert == best, float("-inf"), sums)
        choice = tl.where(kept, choice, float("-inf"))
    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for k in range(TOP_K):
        best = tl.argmax(choice, 0)
        ids = tl.where(slot == k, best, ids)
        weights = tl.where(slot == k, tl.sum(tl.where(expert == best, scores, 0.0), 0), weights)
        choice = tl.where(expert == best, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + added)
    tl.store(ids_ptr + token * TOP_K + slot, ids, mask=slot < TOP_K)
    tl.store(weights_ptr + token * TOP_K + slot, weights * scale, mask=slot < TOP_K)


@register("route_experts", name="triton", predicate=is_cuda, priority=PRIORITY)
def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_best: int = 2,
    added: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    num_tokens, count = logits.shape
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, top_k)
    if num_tokens:
        route_kernel[num_tokens,](
            logits,
            logits if bias is None else bias,
            ids,
            weights,
            logits.stride(0),
            scale,
            added,
            COUNT=count,
            BLOCK=triton.next_power_of_2(count),
            TOP_K=top_k,
            BLOCK_K=triton.next_power_of_2(top_k),
            SIGMOID=scoring == "sigmoid",
            RENORMALIZE=renormalize,
            HAS_BIAS=bias is not None,
            GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            GROUP_BEST=group_best,
            **PLAIN,
        )
    return ids, weights


@triton.jit
def count_kernel(
    ids_ptr,
    slots_ptr,
    counts_ptr,
    num_pairs,
    TOP_K: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program counts BLOCK of ids [T * TOP_K]."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = pair < num_pairs
    if HAS_SLOTS:
        counted = counted & (tl.load(slots_ptr + pair // TOP_K, mask=counted, other=-1) >= 0)
    ids = tl.load(ids_ptr + pair, mask=counted, other=0)
    ones = tl.full([BLOCK], 1, tl.int64)
    tl.atomic_add(counts_ptr + ids, ones, mask=counted, sem="relaxed")


@register("count_experts", name="triton", predicate=is_cuda, priority=PRIORITY)
def count_experts(ids: Tensor, slots: Tensor | None, counts: Tensor) -> None:
    ids = ids.contiguous()
    if ids.numel():
        count_kernel[triton.cdiv(ids.numel(), PAIRS),](
            ids,
            ids if slots is None else slots,
            counts,
            ids.numel(),
            TOP_K=ids.shape[1],
            HAS_SLOTS=slots is not None,
            BLOCK=PAIRS,
            **PLAIN,
        )


@triton.jit
def align_kernel(
    ids_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    num_tiles,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
):
    """The grid is one program. pairs [num_tiles, ROWS]: the pairs of each tile; it is -1 before,
    and stays so where a tile has none. experts [num_tiles]: that of each tile, COUNT where it has
    no pair.
    """
    expert = tl.arange(0, BLOCK)
    lane = tl.arange(0, PAIRS)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < num_pairs, other=-1)
        counts += tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
    tiles = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    places = (ends - tiles) * ROWS  # of each expert's next pair
    for start in range(0, num_pairs, PAIRS):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < num_pairs, other=-1)
        is_of = ids[:, None] == expert[None, :]
        before = tl.cumsum(is_of.to(tl.int32), 0) - 1 + places[None, :]
        place = tl.sum(tl.where(is_of, before, 0), 1)
        tl.store(pairs_ptr + place, start + lane, mask=start + lane < num_pairs)
        places += tl.sum(is_of.to(tl.int32), 0)
    for start in range(0, num_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        behind = (tile[:, None] >= ends[None, :]) & (expert < COUNT)[None, :]
        of_tile = tl.sum(behind.to(tl.int32), 1)
        tl.store(experts_ptr + tile, of_tile, mask=tile < num_tiles)


@triton.jit
def combine_kernel(
    x_ptr, weights_ptr, out_ptr, TOP_K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """out [T, SIZE]: x [T, TOP_K, SIZE] fp32 times weights [T, TOP_K], added in order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(TOP_K):
        x = tl.load(x_ptr + (token * TOP_K + k) * SIZE + column, mask=mask, other=0.0)
        total = tl.fma(x, tl.load(weights_ptr + token * TOP_K + k), total)
    tl.store(out_ptr + token * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=mask)


@register("fused_moe", name="triton", predicate=is_cuda, priority=PRIORITY)
def fused_moe(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    if "triton" not in experts.scratch:
        experts.scratch["triton"] = [
            tables_of(layers, x.device) for layers in (experts.gate_up, experts.down)
        ]
    gate_up, down = experts.scratch["triton"]
    (num_tokens, top_k), count = expert_ids.shape, len(experts.down)
    hidden_size, inner_size = down.shape
    out = x.new_empty(num_tokens, hidden_size)
    if not num_tokens:
        return out
    tiles = _tiles(expert_ids, count)
    inner = x.new_empty(num_tokens * top_k, inner_size)
    multiply(x, gate_up, inner, tiles, count, top_k, experts.activation)
    returned = x.new_empty(num_tokens * top_k, hidden_size, dtype=torch.float32)
    multiply(inner, down, returned, tiles, count, top_k=1)
    block = min(TILE, triton.next_power_of_2(hidden_size))
    combine_kernel[num_tokens, triton.cdiv(hidden_size, block)](
        returned, weights.contiguous(), out, TOP_K=top_k, SIZE=hidden_size, BLOCK=block, **PLAIN
    )
    return out


def _tiles(expert_ids: Tensor, count: int) -> Tiles:
    """Returns the pairs of token and expert in tiles of one expert each (see align_kernel)."""
    expert_ids = expert_ids.contiguous()
    num_pairs = expert_ids.numel()
    num_tiles = min(num_pairs, triton.cdiv(num_pairs, ROWS) + count)
    pairs = torch.full((num_tiles, ROWS), -1, dtype=torch.int32, device=expert_ids.device)
    of_tiles = torch.empty(num_tiles, dtype=torch.int32, device=expert_ids.device)
    align_kernel[1,](
        expert_ids,
        pairs,
        of_tiles,
        num_pairs,
        num_tiles,
        COUNT=count,
        BLOCK=triton.next_power_of_2(count),
        ROWS=ROWS,
        PAIRS=PAIRS,
        TILES=TILES,
    )
    return Tiles(pairs, of_tiles, expert_ids.flatten())


@triton.jit
def scale_by_expert_kernel(weights_ptr, ids_ptr, scales_ptr, count, BLOCK: tl.constexpr):
    """weights and ids [count], weights in place."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    scales = tl.load(scales_ptr + tl.load(ids_ptr + i, mask=mask, other=0), mask=mask)
    tl.store(weights_ptr + i, tl.load(weights_ptr + i, mask=mask) * scales, mask=mask)


@register("scale_by_expert", name="triton", predicate=is_cuda, priority=PRIORITY)
def scale_by_expert(weights: Tensor, ids: Tensor, scales: Tensor) -> None:
    count = weights.numel()
    scale_by_expert_kernel[(triton.cdiv(count, TILE),)](weights, ids, scales, count, BLOCK=TILE)


@triton.jit
def add_gated_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    x_stride,
    gate_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x and out [T, SIZE] with strides, gate [T]; out in place."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate = tl.sigmoid(tl.load(gate_ptr + token * gate_stride))
    x = tl.load(x_ptr + token * x_stride + column, mask=mask).to(tl.float32)
    out_ptrs = out_ptr + token * out_stride + column
    out = tl.load(out_ptrs, mask=mask)
    tl.store(out_ptrs, tl.fma(x, gate, out.to(tl.float32)).to(out.dtype), mask=mask)


@register("add_gated", name="triton", predicate=is_cuda, priority=PRIORITY)
def add_gated(x: Tensor, gate: Tensor, out: Tensor) -> None:
    size = x.shape[1]
    block = min(TILE, triton.next_power_of_2(size))
    add_gated_kernel[len(x), triton.cdiv(size, block)](
        x,
        gate,
        out,
        x.stride(0),
        gate.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=block,
        **PLAIN,
    )
