"""Where top_k and top_p cut a row's order, in Triton, without sorting.

Must not know: the noise, what is drawn.

Three launches. The first counts tokens by how far they lie below the row's largest, in LEVELS steps
of 1/16, and adds up their mass. From the counts alone it follows between which levels the cut lies:
of top_k, in the one that the k-th token falls into; of top_p, where the mass behind passes 1 -
top_p of the whole, if each token weighed as little, or as much, as its level allows. The second
launch lists the tokens of these levels, mostly a few hundred, and adds up what comes before. The
third looks for the cut among them, one program per row, by halving the range in which it may lie,
and snaps the range to tokens that exist. A row of which more than CAPACITY would have to be listed
(nearly all logits within one or two steps) is searched as it stands, which takes several times
longer. Lists take 128 KiB to a row, for the time of a draw that filters: 32 MiB for 256 rows, which
the worker has measured with the largest step before it sizes the cache.

Masses are sums of integers, exp(scaled) in fp64 in steps of 2**-44, so that their order does not
matter and equal tokens weigh the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ipc.errors import InvalidParameterError
from .order import CHUNK, HIGHEST, LOWEST, TILE, first_of_row, load_logits, order_of, value_of

GREEDY_BELOW = tl.constexpr(1e-5)
LEVELS, PER_UNIT = tl.constexpr(512), tl.constexpr(16)
# of a row: tokens of each level, the mass, how many tokens are listed, how many or how much comes
# before them; no more
TALLIES = 512 + 16
MASS, LISTED, BEFORE = tl.constexpr(512), tl.constexpr(513), tl.constexpr(514)
UNIT, MOST_TOKENS = tl.constexpr(2.0**44), 2**19  # of so many, the mass fits into 64 bits
CAPACITY = 8192  # listed tokens of a row
MARGIN = tl.constexpr(1e-3)  # for the rounding of masses estimated from levels


@triton.jit
def scale(x, largest, temperature):
    """As the reference rounds it"""
    return tl.div_rn(x - largest, temperature)


@triton.jit
def least_scaled(min_p):
    """f64: min_p asks whether exp(scaled) >= min_p"""
    return tl.where(
        min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64)), float("-inf")
    )


@triton.jit
def mass_of(scaled):
    """i64 of one token"""
    return (tl.exp(scaled.to(tl.float64)) * UNIT + 0.5).to(tl.int64)


@triton.jit
def has_top_k(top_k, vocab_size):
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def level_of(x, scaled, largest, counts_only):
    """i32: 0 for the largest, the last for all that lie far below. top_k does not ask how far a
    temperature spreads the logits.
    """
    distance = tl.where(counts_only, largest - x, -scaled)
    return tl.minimum(distance * PER_UNIT, LEVELS - 1).to(tl.int32)


@triton.jit
def has_cut(temperature, top_k, top_p, vocab_size):
    return (temperature >= GREEDY_BELOW) & (has_top_k(top_k, vocab_size) | (top_p < 1))


@triton.jit
def tally_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    parts_ptr,
    tallies_ptr,
    vocab_size,
    num_chunks,
    row_stride,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TALLIES: tl.constexpr,
):
    """tallies [rows, TALLIES] i64, zeros before: tokens that min_p leaves, by level, and their mass
    if it is top_p's.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p = (
        tl.load(temperature_ptr + row),
        tl.load(top_k_ptr + row),
        tl.load(top_p_ptr + row),
    )
    if has_cut(temperature, top_k, top_p, vocab_size):
        largest = value_of(first_of_row(parts_ptr, row, num_chunks, BLOCK))
        least = least_scaled(tl.load(min_p_ptr + row))
        counts = tl.zeros([LEVELS], tl.int32)
        mass = tl.zeros([TILE], tl.int64)
        for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab_size), TILE):
            token = start + tl.arange(0, TILE)
            x = load_logits(logits_ptr + row.to(tl.int64) * row_stride, token, vocab_size)
            scaled = scale(x, largest, temperature)
            is_left = (scaled.to(tl.float64) >= least) & (token < vocab_size)
            level = level_of(x, scaled, largest, has_top_k(top_k, vocab_size))
            counts += tl.histogram(tl.where(is_left, level, 0), LEVELS, mask=is_left)
            if not has_top_k(top_k, vocab_size):
                mass += tl.where(is_left, mass_of(scaled), 0)
        tallies_ptr += row.to(tl.int64) * TALLIES
        tl.atomic_add(
            tallies_ptr + tl.arange(0, LEVELS), counts.to(tl.int64), mask=counts > 0, sem="relaxed"
        )
        tl.atomic_add(tallies_ptr + MASS, tl.sum(mass, axis=0), sem="relaxed")


@triton.jit
def bounds(tallies_ptr, top_k, top_p, vocab_size):
    """The first and the last level of which tokens must be listed."""
    level = tl.arange(0, LEVELS)
    counts = tl.load(tallies_ptr + level)
    if has_top_k(top_k, vocab_size):
        last = tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0)
        first = tl.where(top_p < 1, 0, last)  # top_p may cut anywhere before
    else:
        most = counts.to(tl.float64) * tl.exp(-level.to(tl.float64) / PER_UNIT)
        least = tl.where(
            level < LEVELS - 1,
            counts.to(tl.float64) * tl.exp(-(level + 1).to(tl.float64) / PER_UNIT),
            0.0,
        )
        spared = (1.0 - top_p).to(tl.float64) * tl.load(tallies_ptr + MASS).to(tl.float64) / UNIT
        # this level and those behind have more than is spared
        is_before = tl.cumsum(least, axis=0, reverse=True) > spared * (1 + MARGIN)
        may_be_before = tl.cumsum(most, axis=0, reverse=True) > spared * (1 - MARGIN)
        first = tl.sum((is_before & (level > 0)).to(tl.int32), axis=0)
        last = tl.sum((may_be_before & (level > 0)).to(tl.int32), axis=0)
    return first, last


@triton.jit
def list_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    parts_ptr,
    tallies_ptr,
    orders_ptr,
    masses_ptr,
    vocab_size,
    num_chunks,
    row_stride,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TALLIES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """orders and masses [rows, CAPACITY] i64, in any order: the tokens that min_p leaves, of the
    levels in question. What comes before them is summed up: tokens for top_k, mass for top_p.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p = (
        tl.load(temperature_ptr + row),
        tl.load(top_k_ptr + row),
        tl.load(top_p_ptr + row),
    )
    if has_cut(temperature, top_k, top_p, vocab_size):
        largest = value_of(first_of_row(parts_ptr, row, num_chunks, BLOCK))
        least = least_scaled(tl.load(min_p_ptr + row))
        tallies_ptr += row.to(tl.int64) * TALLIES
        first, last = bounds(tallies_ptr, top_k, top_p, vocab_size)
        before = tl.zeros([TILE], tl.int64)
        for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab_size), TILE):
            token = start + tl.arange(0, TILE)
            x = load_logits(logits_ptr + row.to(tl.int64) * row_stride, token, vocab_size)
            scaled = scale(x, largest, temperature)
            level = level_of(x, scaled, largest, has_top_k(top_k, vocab_size))
            is_left = (scaled.to(tl.float64) >= least) & (token < vocab_size) & (level <= last)
            is_listed = (is_left & (level >= first)).to(tl.int32)
            if tl.max(is_left.to(tl.int32), axis=0) > 0:
                mass = mass_of(scaled)
                before += tl.where(
                    is_left & (level < first), tl.where(has_top_k(top_k, vocab_size), 1, mass), 0
                )
                count = tl.sum(is_listed, axis=0)
                if count > 0:
                    place = (
                        tl.atomic_add(tallies_ptr + LISTED, count.to(tl.int64), sem="relaxed")
                        + tl.cumsum(is_listed, axis=0)
                        - 1
                    )
                    has_place = (is_listed > 0) & (place < CAPACITY)
                    place += row.to(tl.int64) * CAPACITY
                    tl.store(orders_ptr + place, order_of(x, token), mask=has_place)
                    tl.store(masses_ptr + place, mass, mask=has_place)
        tl.atomic_add(tallies_ptr + BEFORE, tl.sum(before, axis=0), sem="relaxed")


@triton.jit
def weigh(at, tokens, scaling, vocab_size, MASSES: tl.constexpr, TILE: tl.constexpr):
    """Of the tokens from `at` on: their number, or with MASSES their mass; the last of them; and
    the first of those behind. i64.

    tokens: whether they are listed, how many, where their orders and masses are, and the row.
    scaling: largest, temperature, the least scaled.
    """
    is_listed, size, orders_ptr, masses_ptr, row_ptr = tokens
    largest, temperature, least = scaling
    total, last, behind = (
        tl.zeros([TILE], tl.int64),
        tl.full([TILE], HIGHEST, tl.int64),
        tl.full([TILE], LOWEST, tl.int64),
    )
    for start in range(0, size, TILE):
        place = start + tl.arange(0, TILE)
        if is_listed:
            order = tl.load(orders_ptr + place, mask=place < size, other=LOWEST)
            weight = (
                tl.load(masses_ptr + place, mask=place < size, other=0)
                if MASSES
                else tl.full([TILE], 1, tl.int64)
            )
        else:
            x = load_logits(row_ptr, place, vocab_size)
            scaled = scale(x, largest, temperature)
            order = tl.where(
                (scaled.to(tl.float64) >= least) & (place < vocab_size), order_of(x, place), LOWEST
            )
            weight = mass_of(scaled) if MASSES else tl.full([TILE], 1, tl.int64)
        is_from = (order >= at) & (order > LOWEST)
        total += tl.where(is_from, weight, 0)
        last = tl.minimum(last, tl.where(is_from, order, HIGHEST))
        behind = tl.maximum(behind, tl.where(order < at, order, LOWEST))
    return tl.sum(total, axis=0), tl.min(last, axis=0), tl.max(behind, axis=0)


@triton.jit
def search(
    low, high, wanted, tokens, scaling, vocab_size, MASSES: tl.constexpr, TILE: tl.constexpr
):
    """The last token of the shortest beginning that has at least `wanted`: one between low and
    high, as orders. That from low on has it.
    """
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up
        total, last, behind = weigh(middle, tokens, scaling, vocab_size, MASSES, TILE)
        if total >= wanted:
            low = last
            high = tl.where(total == wanted, last, high)
        else:
            high = behind
    return low


@triton.jit
def find_cuts_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    parts_ptr,
    tallies_ptr,
    orders_ptr,
    masses_ptr,
    cuts_ptr,
    vocab_size,
    num_chunks,
    row_stride,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TALLIES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """cuts [rows] i64: the order of the last token that top_k and top_p keep. min_p may keep
    fewer.
    """
    row = tl.program_id(0)
    temperature, top_k, top_p = (
        tl.load(temperature_ptr + row),
        tl.load(top_k_ptr + row).to(tl.int64),
        tl.load(top_p_ptr + row),
    )
    cut = tl.full([], LOWEST, tl.int64)
    if has_cut(temperature, top_k, top_p, vocab_size):
        least = least_scaled(tl.load(min_p_ptr + row))
        first = first_of_row(parts_ptr, row, num_chunks, BLOCK)
        scaling = value_of(first), temperature, least
        tallies_ptr += row.to(tl.int64) * TALLIES
        num_listed = tl.load(tallies_ptr + LISTED)
        is_listed = num_listed <= CAPACITY
        size = tl.where(is_listed, num_listed, vocab_size).to(tl.int32)
        list_start = row.to(tl.int64) * CAPACITY
        tokens = (
            is_listed,
            size,
            orders_ptr + list_start,
            masses_ptr + list_start,
            logits_ptr + row.to(tl.int64) * row_stride,
        )
        before = tl.where(is_listed, tl.load(tallies_ptr + BEFORE), 0)
        mass = tl.load(tallies_ptr + MASS)
        count, low, _ = weigh(LOWEST, tokens, scaling, vocab_size, False, TILE)
        if has_top_k(top_k, vocab_size):
            if before + count > top_k:
                low = search(low, first, top_k - before, tokens, scaling, vocab_size, False, TILE)
            if before + count >= top_k:
                cut = low
            if top_p < 1:
                mass, _, _ = weigh(low, tokens, scaling, vocab_size, True, TILE)
        if top_p < 1:
            wanted = tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64) - before
            cut = search(low, first, wanted, tokens, scaling, vocab_size, True, TILE)
    tl.store(cuts_ptr + row, cut)


def find_cuts(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, parts: Tensor
) -> Tensor:
    """parts [rows, chunks] i64: the orders of the chunks' first tokens -> [rows] i64.

    A row without top_k and top_p keeps all orders.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size >= MOST_TOKENS:
        raise InvalidParameterError(
            "logits",
            f"must have fewer than {MOST_TOKENS} tokens to a row to be filtered, got {vocab_size}",
        )
    num_chunks = parts.shape[1]
    tallies = torch.zeros(num_rows, TALLIES, dtype=torch.int64, device=logits.device)
    orders, masses = torch.empty(2, num_rows, CAPACITY, dtype=torch.int64, device=logits.device)
    cuts = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    inputs = logits, temperature, top_k, top_p, min_p, parts, tallies
    sizes = vocab_size, num_chunks, logits.stride(0)
    options = {
        "TILE": TILE,
        "BLOCK": triton.next_power_of_2(num_chunks),
        "TALLIES": TALLIES,
        "enable_fp_fusion": False,
    }
    tally_kernel[num_rows, num_chunks](*inputs, *sizes, CHUNK=CHUNK, **options)
    options["CAPACITY"] = CAPACITY
    list_kernel[num_rows, num_chunks](*inputs, orders, masses, *sizes, CHUNK=CHUNK, **options)
    find_cuts_kernel[(num_rows,)](*inputs, orders, masses, cuts, *sizes, **options, num_warps=8)
    return cuts
