"""Finds the largest logit of a row, and draws a token, in Triton. It does not sort and does not
wait. A row's token depends on the row alone.

Must not know: models, requests, how top_k and top_p are applied.

The largest logit takes one launch, a draw one more, and a draw that filters two: the program of a
row that ends last joins what its chunks have found.
"""

# pyright: reportPossiblyUnboundVariable=false
# (branches on constexpr are Triton's)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ipc.errors import InvalidParameterError
from .. import choice
from ..registry import register
from .device import PRIORITY, is_cuda
from .logprobs import log_denominator, score_chunk, store_logprobs
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

NOT_SCORED = tl.constexpr(choice.NOT_SCORED)


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
def draw_chunk(
    row,
    chunk,
    row_ptr,
    largest,
    temperature,
    filters,
    seed,
    position,
    lists,
    drawn_ptr,
    vocab_size,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    FILTERED: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Writes drawn [rows, chunks] i64: the order of the chunk's largest scaled + noise, of tokens
    that are certainly kept. With FILTERED, the row's tokens that may be kept are listed. Those
    before them are counted for top_k; for top_p their mass is summed.

    filters: top_k, top_p, min_p. lists: pointers to the row's tallies, orders and masses.
    """
    is_listing = False
    if FILTERED:
        top_k, top_p, min_p = filters
        tallies_ptr, orders_ptr, masses_ptr = lists
        least = least_scaled(min_p)
        is_listing = has_last_kept(temperature, top_k, top_p, vocab_size)
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
                    weight = tl.where(has_top_k(top_k, vocab_size), 1, mass)
                    before += tl.where(is_kept, weight, 0)
                    list_tile(
                        order_of(x, token),
                        mass,
                        is_listed,
                        tallies_ptr,
                        orders_ptr,
                        masses_ptr,
                        CAPACITY,
                    )
        if tl.max(is_kept.to(tl.int32), axis=0) > 0:
            noise = gumbel(uniform(start, seed, position, TILE))
            score = tl.where(is_kept, scaled + noise, float("-inf"))
            best = tl.maximum(best, tl.max(order_of(score, token), axis=0))
    tl.store(drawn_ptr + row * tl.num_programs(1) + chunk, best)
    if FILTERED:
        if is_listing:
            tl.atomic_add(tallies_ptr + BEFORE, tl.sum(before, axis=0), sem="relaxed")


@triton.jit
def end_of_draw(
    row,
    row_ptr,
    first_token,
    largest,
    temperature,
    filters,
    seed,
    position,
    lists,
    drawn_ptr,
    last_kept_ptr,
    vocab_size,
    num_chunks,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Returns the token of a row whose chunks have been drawn. Writes last_kept [rows] i64."""
    best = first_of_row(drawn_ptr, row, num_chunks, BLOCK)
    if FILTERED:
        top_k, top_p, min_p = filters
        if has_last_kept(temperature, top_k, top_p, vocab_size):
            scaling = largest, temperature, least_scaled(min_p)
            tokens = listed_tokens(row_ptr, lists, vocab_size, CAPACITY)
            last_kept = find_last_kept(
                order_of(largest, first_token),
                tokens,
                scaling,
                lists[0],
                top_k.to(tl.int64),
                top_p,
                vocab_size,
                TILE,
            )
            tl.store(last_kept_ptr + row, last_kept)
            drawn = draw_from_list(last_kept, tokens, scaling, seed, position, vocab_size, TILE)
            best = tl.maximum(best, drawn)
    return token_of(best)


@triton.jit
def raw_logits(own_ptr, raw_ptr, raw_row, raw_stride, start, vocab_size, SIZE: tl.constexpr):
    """The logits of the tokens from `start` on [SIZE] f32: see raw_rows in choose_tokens."""
    token = start + tl.arange(0, SIZE)
    if raw_row >= 0:
        x = load_logits(raw_ptr + raw_row * raw_stride, token, vocab_size)
    else:
        x = load_logits(own_ptr, token, vocab_size)
    return x


@triton.jit
def end_of_scores(
    row,
    row_ptr,
    chosen,
    raw_ptr,
    raw_row,
    raw_stride,
    parts_ptr,
    sums_ptr,
    tops_ptr,
    ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    vocab_size,
    num_chunks,
    k,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPS: tl.constexpr,
):
    """Writes a row's results of choose_tokens. Only where the chosen token is less likely than
    those that are listed, the row is read again, by this one program.
    """
    if raw_row >= 0:
        x = tl.load(raw_ptr + raw_row * raw_stride + chosen)
    else:
        x = tl.load(row_ptr + chosen)
    above, last = store_logprobs(
        x,
        chosen,
        log_denominator(parts_ptr, sums_ptr, row, num_chunks, BLOCK),
        tops_ptr + row.to(tl.int64) * num_chunks * k,
        ids_ptr + row.to(tl.int64) * (k + 1),
        logprobs_ptr + row.to(tl.int64) * (k + 1),
        num_chunks * k,
        k,
        TOPS,
    )
    if x < last:
        counts = tl.zeros([TILE], tl.int32)
        for start in range(0, vocab_size, TILE):
            others = raw_logits(row_ptr, raw_ptr, raw_row, raw_stride, start, vocab_size, TILE)
            counts += (others > x).to(tl.int32)
        above = tl.sum(counts, axis=0)
    tl.store(ranks_ptr + row, 1 + above)


@triton.jit(do_not_specialize=["k"])
def choose_kernel(
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
    last_kept_ptr,
    raw_ptr,
    raw_rows_ptr,
    parts_ptr,
    sums_ptr,
    tops_ptr,
    ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    counters_ptr,
    token_ids_ptr,
    vocab_size,
    num_chunks,
    row_stride,
    raw_stride,
    k,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPS: tl.constexpr,
    TALLIES: tl.constexpr,
    CAPACITY: tl.constexpr,
    DRAWN: tl.constexpr,
    FILTERED: tl.constexpr,
    SCORED: tl.constexpr,
):
    """token_ids [rows] i64. DRAWN: the token with the largest scaled + noise, or, in a greedy row,
    the largest one; with FILTERED also last_kept [rows] i64, the order of the last token that top_k
    and top_p keep, of rows that have one. SCORED: ids, logprobs and ranks of rows that are scored.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    token = tl.load(largest_ptr + row)
    is_drawn, is_scored = row < 0, row < 0
    if DRAWN:
        temperature = tl.load(temperature_ptr + row)
        is_drawn = temperature >= GREEDY_BELOW
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        largest = load_logit(row_ptr, token)
        filters = 0, 1.0, 0.0
        lists = tallies_ptr, orders_ptr, masses_ptr
        if FILTERED:
            filters = (
                tl.load(top_k_ptr + row),
                tl.load(top_p_ptr + row),
                tl.load(min_p_ptr + row),
            )
            lists = (
                tallies_ptr + row.to(tl.int64) * TALLIES,
                orders_ptr + row.to(tl.int64) * CAPACITY,
                masses_ptr + row.to(tl.int64) * CAPACITY,
            )
        if is_drawn:
            draw_chunk(
                row,
                chunk,
                row_ptr,
                largest,
                temperature,
                filters,
                seed,
                position,
                lists,
                drawn_ptr,
                vocab_size,
                CHUNK,
                TILE,
                FILTERED,
                CAPACITY,
            )
    if SCORED:
        raw_row = tl.load(raw_rows_ptr + row)
        is_scored = raw_row > NOT_SCORED
        if is_scored:
            x = raw_logits(row_ptr, raw_ptr, raw_row, raw_stride, chunk * CHUNK, vocab_size, CHUNK)
            score_chunk(x, row * num_chunks, chunk, parts_ptr, sums_ptr, tops_ptr, k, CHUNK)
    if not (is_drawn | is_scored):
        if chunk == 0:
            tl.store(token_ids_ptr + row, token)
        return
    if is_last_of_row(counters_ptr, row):
        if DRAWN:
            if is_drawn:
                token = end_of_draw(
                    row,
                    row_ptr,
                    token,
                    largest,
                    temperature,
                    filters,
                    seed,
                    position,
                    lists,
                    drawn_ptr,
                    last_kept_ptr,
                    vocab_size,
                    num_chunks,
                    TILE,
                    BLOCK,
                    FILTERED,
                    CAPACITY,
                )
        tl.store(token_ids_ptr + row, token)
        if SCORED:
            if is_scored:
                end_of_scores(
                    row,
                    row_ptr,
                    token,
                    raw_ptr,
                    raw_row,
                    raw_stride,
                    parts_ptr,
                    sums_ptr,
                    tops_ptr,
                    ids_ptr,
                    logprobs_ptr,
                    ranks_ptr,
                    vocab_size,
                    num_chunks,
                    k,
                    TILE,
                    BLOCK,
                    TOPS,
                )


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
    return choose(logits, largest, Draw(temperature, top_k, top_p, min_p, seeds, positions))[0]


class Draw(NamedTuple):
    """The columns of sample_tokens."""

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seeds: Tensor
    positions: Tensor


class Scores(NamedTuple):
    """The arguments of choose_tokens for log-probabilities, and its results."""

    raw: Tensor
    raw_rows: Tensor
    k: int
    ids: Tensor
    logprobs: Tensor
    ranks: Tensor


def choose(
    logits: Tensor, largest: Tensor, draw: Draw | None, scores: Scores | None = None
) -> tuple[Tensor, Tensor]:
    """-> token_ids, last_kept: see choose_kernel."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    token_ids, largest = empty(), largest.contiguous()
    if not num_rows:
        return token_ids, token_ids
    # `largest` stands for what a launch without a draw, filters or scores does not touch
    columns, lists, drawn, last_kept = [largest] * 6, [largest] * 3, largest, largest
    of_scores, k, raw_stride, is_filtered = [largest] * 8, 0, 0, False
    grid, sizes = (num_rows, num_chunks), {"CHUNK": CHUNK, "TILE": TILE, "TALLIES": TALLIES}
    if draw is not None:
        columns = [largest if column is None else column.contiguous() for column in draw]
        drawn, is_filtered = empty(num_chunks), draw.top_k is not None
    if is_filtered:
        check_size(vocab_size)
        tallies = torch.zeros(num_rows, TALLIES, dtype=torch.int64, device=logits.device)
        lists, last_kept = [tallies, empty(CAPACITY), empty(CAPACITY)], empty()
        tally_kernel[grid](
            *(logits, largest, *columns[:4], tallies, vocab_size, logits.stride(0)),
            **sizes,
            enable_fp_fusion=False,
        )
    if scores is not None:
        k, raw_stride = scores.k, scores.raw.stride(0)
        found = empty(num_chunks), empty(num_chunks, dtype=torch.float32)
        tops = empty(num_chunks, max(k, 1))
        raw_rows, results = scores.raw_rows.contiguous(), (scores.ids, scores.logprobs)
        of_scores = [scores.raw, raw_rows, *found, tops, *results, scores.ranks]
    choose_kernel[grid](
        *(logits, largest, *columns, *lists, drawn, last_kept, *of_scores),
        *(row_counters(logits), token_ids),
        *(vocab_size, num_chunks, logits.stride(0), raw_stride, k),
        **sizes,
        BLOCK=triton.next_power_of_2(num_chunks),
        TOPS=triton.next_power_of_2(max(k, 1) * num_chunks),
        CAPACITY=CAPACITY,
        DRAWN=draw is not None,
        FILTERED=is_filtered,
        SCORED=scores is not None,
        enable_fp_fusion=False,
    )
    return token_ids, last_kept


def check_size(vocab_size: int) -> None:
    """Raises InvalidParameterError for rows whose masses would not fit into their integers."""
    if vocab_size >= MOST_TOKENS:
        raise InvalidParameterError(
            "logits",
            f"must have fewer than {MOST_TOKENS} tokens per row if top_k or top_p is set, "
            f"got {vocab_size}",
        )
