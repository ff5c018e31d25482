"""Finds the largest logit of a row, and draws a token, in Triton. It does not sort and does not
wait. A row's token depends on the row alone.

Must not know: models, requests, how top_k and top_p are applied.

The largest logit takes one launch, a draw one more, and a draw that filters two: the program of a
row that ends last joins what its chunks have found.
"""

# pyright: reportPossiblyUnboundVariable=false
# (branches on constexpr are Triton's)

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ipc.errors import InvalidParameterError
from ..registry import register
from .device import PRIORITY, is_cuda
from .noise import gumbel, uniform, uniform_at
from .order import (
    CHUNK,
    LOWEST,
    TILE,
    first_of_row,
    first_token_kernel,
    is_last_of_row,
    load_logit,
    load_logits,
    order_of,
    row_counters,
    token_of,
    value_of,
)
from .top_k_top_p import (
    BEFORE,
    CAPACITY,
    GREEDY_BELOW,
    LEVELS,
    MOST_TOKENS,
    TALLIES,
    bounds,
    find_last_kept,
    has_last_kept,
    has_top_k,
    least_scaled,
    level_of,
    list_tile,
    listed_tokens,
    mass_of,
    scale,
    tally_kernel,
)


@triton.jit
def draw_from_list(last, tokens, scaling, seed, position, vocab_size, TILE: tl.constexpr):
    """-> i64: the order of the token with the largest scaled + noise, of those of `tokens` (see
    weigh) up to `last`, an order.
    """
    is_listed, size, orders_ptr, _, row_ptr = tokens
    largest, temperature, least = scaling
    best = tl.full([], LOWEST, tl.int64)
    for start in range(0, size, TILE):
        place = start + tl.arange(0, TILE)
        if is_listed:
            order = tl.load(orders_ptr + place, mask=place < size, other=LOWEST)
            x, token = value_of(order), token_of(order).to(tl.int32)
        else:
            x, token = load_logits(row_ptr, place, vocab_size), place
            order = order_of(x, token)
        scaled = scale(x, largest, temperature)
        is_kept = (place < size) & (order >= last) & (scaled.to(tl.float64) >= least)
        if tl.max(is_kept.to(tl.int32), axis=0) > 0:
            noise = gumbel(uniform_at(token, seed, position))
            score = tl.where(is_kept, scaled + noise, float("-inf"))
            best = tl.maximum(best, tl.max(tl.where(is_kept, order_of(score, token), LOWEST), 0))
    return best


@triton.jit
def draw_kernel(
    logits_ptr,
    largest_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    tallies_ptr,
    orders_ptr,
    masses_ptr,
    drawn_ptr,
    counters_ptr,
    token_ids_ptr,
    last_kept_ptr,
    vocab_size,
    num_chunks,
    row_stride,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TALLIES: tl.constexpr,
    CAPACITY: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """token_ids [rows] i64: the token with the largest scaled + noise or, in a greedy row, the
    largest. With FILTERED also last_kept [rows] i64, the order of the last token that top_k and
    top_p keep, of rows that have one.

    drawn [rows, chunks] i64: the order of each chunk's largest sum, of tokens that are certainly
    kept. Other tokens that may be kept are listed: orders and masses [rows, CAPACITY] i64. Those
    before them are counted for top_k; for top_p their mass is summed.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature, first_token = tl.load(temperature_ptr + row), tl.load(largest_ptr + row)
    if temperature < GREEDY_BELOW:
        if chunk == 0:
            tl.store(token_ids_ptr + row, first_token)
        return
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    largest = load_logit(row_ptr, first_token)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    is_listing = False
    if FILTERED:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        least = least_scaled(tl.load(min_p_ptr + row))
        is_listing = has_last_kept(temperature, top_k, top_p, vocab_size)
        tallies_ptr += row.to(tl.int64) * TALLIES
        list_start = row.to(tl.int64) * CAPACITY
        first, last = tl.full([], LEVELS, tl.int32), tl.full([], LEVELS, tl.int32)
        if is_listing:
            first, last = bounds(tallies_ptr, top_k, top_p, vocab_size)
        before = tl.zeros([TILE], tl.int64)
    best = order_of(tl.full([], float("-inf"), tl.float32), chunk * CHUNK)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab_size), TILE):
        token = start + tl.arange(0, TILE)
        x = load_logits(row_ptr, token, vocab_size)
        scaled = scale(x, largest, temperature)
        is_kept = token < vocab_size
        if FILTERED:
            is_kept = is_kept & (scaled.to(tl.float64) >= least)
            if is_listing:
                level = level_of(x, scaled, largest, has_top_k(top_k, vocab_size))
                is_left = is_kept & (level <= last)
                is_kept = is_kept & (level < first)
                if tl.max(is_left.to(tl.int32), axis=0) > 0:
                    mass, is_listed = mass_of(scaled), is_left & (level >= first)
                    before += tl.where(is_kept, tl.where(has_top_k(top_k, vocab_size), 1, mass), 0)
                    list_tile(
                        order_of(x, token),
                        mass,
                        is_listed,
                        tallies_ptr,
                        orders_ptr,
                        masses_ptr,
                        list_start,
                        CAPACITY,
                    )
        if tl.max(is_kept.to(tl.int32), axis=0) > 0:
            score = tl.where(
                is_kept, scaled + gumbel(uniform(start, seed, position, TILE)), float("-inf")
            )
            best = tl.maximum(best, tl.max(order_of(score, token), axis=0))
    tl.store(drawn_ptr + row * num_chunks + chunk, best)
    if FILTERED:
        if is_listing:
            tl.atomic_add(tallies_ptr + BEFORE, tl.sum(before, axis=0), sem="relaxed")
    if is_last_of_row(counters_ptr, row):
        best = first_of_row(drawn_ptr, row, num_chunks, BLOCK)
        if FILTERED:
            if is_listing:
                scaling = largest, temperature, least
                tokens = listed_tokens(
                    row_ptr, tallies_ptr, orders_ptr, masses_ptr, list_start, vocab_size, CAPACITY
                )
                last_kept = find_last_kept(
                    order_of(largest, first_token),
                    tokens,
                    scaling,
                    tallies_ptr,
                    top_k.to(tl.int64),
                    top_p,
                    vocab_size,
                    TILE,
                )
                tl.store(last_kept_ptr + row, last_kept)
                best = tl.maximum(
                    best,
                    draw_from_list(last_kept, tokens, scaling, seed, position, vocab_size, TILE),
                )
        tl.store(token_ids_ptr + row, token_of(best))


@register("argmax", name="triton", predicate=is_cuda, priority=PRIORITY)
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        num_chunks = triton.cdiv(vocab_size, CHUNK)
        parts = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
        finite = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
        first_token_kernel[num_rows, num_chunks](
            logits,
            parts,
            finite,
            row_counters(logits),
            token_ids,
            is_finite,
            vocab_size,
            num_chunks,
            logits.stride(0),
            CHUNK=CHUNK,
            BLOCK=triton.next_power_of_2(num_chunks),
        )
    return token_ids, is_finite


@register("sample_tokens", name="triton", predicate=is_cuda, priority=PRIORITY)
def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    largest: Tensor | None = None,
) -> Tensor:
    if largest is None:
        largest, _ = argmax(logits)
    return draw(logits, largest, temperature, (top_k, top_p, min_p), seeds, positions)[0]


def draw(
    logits: Tensor,
    largest: Tensor,
    temperature: Tensor,
    filters: tuple[Tensor | None, ...],
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """As sample_tokens -> token_ids, last_kept: see draw_kernel."""
    num_rows, vocab_size = logits.shape
    is_filtered = all(column is not None for column in filters)
    if is_filtered and vocab_size >= MOST_TOKENS:
        raise InvalidParameterError(
            "logits",
            f"must have fewer than {MOST_TOKENS} tokens per row if top_k or top_p is set, "
            f"got {vocab_size}",
        )
    num_chunks = triton.cdiv(vocab_size, CHUNK)

    def empty(*shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=torch.int64, device=logits.device)

    token_ids, drawn = empty(), empty(num_chunks)
    if not num_rows:
        return token_ids, token_ids
    largest, temperature = largest.contiguous(), temperature.contiguous()
    grid, sizes = (num_rows, num_chunks), {"CHUNK": CHUNK, "TILE": TILE, "TALLIES": TALLIES}
    # without filters the kernel does not read these
    columns: list[Tensor] = [temperature] * 3
    tallies = orders = masses = last_kept = token_ids
    if is_filtered:
        columns = [column.contiguous() for column in filters if column is not None]
        tallies = torch.zeros(num_rows, TALLIES, dtype=torch.int64, device=logits.device)
        orders, masses, last_kept = empty(CAPACITY), empty(CAPACITY), empty()
        tally_kernel[grid](
            *(logits, largest, temperature, *columns, tallies),
            *(vocab_size, logits.stride(0)),
            **sizes,
            enable_fp_fusion=False,
        )
    draw_kernel[grid](
        *(logits, largest, temperature, *columns, seeds.contiguous(), positions.contiguous()),
        *(tallies, orders, masses, drawn, row_counters(logits), token_ids, last_kept),
        *(vocab_size, num_chunks, logits.stride(0)),
        **sizes,
        BLOCK=triton.next_power_of_2(num_chunks),
        CAPACITY=CAPACITY,
        FILTERED=is_filtered,
        enable_fp_fusion=False,
    )
    return token_ids, last_kept
