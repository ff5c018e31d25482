"""Finds the last token of a row's order that top_k and top_p keep, in Triton, without sorting.

Must not know: the noise, the draw.

There are two launches, of which the second also draws (sampling.py):

1. tally_kernel counts tokens by their distance below the row's largest logit, in LEVELS steps of
   1/16, and sums their mass. The counts determine the levels that contain the last kept token. For
   top_k it is the level of the k-th token. For top_p it is where the mass of the remaining tokens
   passes 1 - top_p of the whole, computed once with the smallest and once with the largest weight
   that each level allows.
2. list_tile lists the tokens of these levels, mostly a few hundred, and sums what precedes them.
   The program of a row that ends last searches the list (find_last_kept). It halves the range that
   contains the last kept token, and narrows the range to tokens that exist.

A row that would need more than CAPACITY listed tokens (nearly all logits within one or two steps)
is searched without a list, which takes several times longer. The lists of a draw that filters take
128 KiB per row, 32 MiB for 256 rows. The worker measures this with the largest step before it sizes
the cache.

Masses are sums of integers, exp(scaled) in fp64 in units of 2**-44, so that the order of summation
does not matter and equal tokens have equal weight.
"""

import triton
import triton.language as tl

from .order import HIGHEST, LOWEST, load_logit, load_logits, order_of

GREEDY_BELOW = tl.constexpr(1e-5)
LEVELS, PER_UNIT = tl.constexpr(512), tl.constexpr(16)
# A row has these entries: tokens of each level, the mass, the number of listed tokens, the number
# or mass of the tokens before them. The rest is unused.
TALLIES = 512 + 16
MASS, LISTED, BEFORE = tl.constexpr(512), tl.constexpr(513), tl.constexpr(514)
# With fewer tokens than this the mass fits into 64 bits.
UNIT, MOST_TOKENS = tl.constexpr(2.0**44), 2**19
CAPACITY = 8192  # listed tokens per row
MARGIN = tl.constexpr(1e-3)  # allowance for rounding in masses estimated from levels


@triton.jit
def scale(x, largest, temperature):
    """The result is rounded as in the reference."""
    return tl.div_rn(x - largest, temperature)


@triton.jit
def least_scaled(min_p):
    """-> f64. min_p keeps a token if exp(scaled) >= min_p."""
    return tl.where(
        min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64)), float("-inf")
    )


@triton.jit
def mass_of(scaled):
    """-> i64, the mass of one token"""
    return (tl.exp(scaled.to(tl.float64)) * UNIT + 0.5).to(tl.int64)


@triton.jit
def has_top_k(top_k, vocab_size):
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def level_of(x, scaled, largest, counts_only):
    """-> i32: 0 for the largest logit, LEVELS - 1 for all tokens far below it.

    With counts_only, as for top_k, levels do not depend on the temperature.
    """
    distance = tl.where(counts_only, largest - x, -scaled)
    return tl.minimum(distance * PER_UNIT, LEVELS - 1).to(tl.int32)


@triton.jit
def has_last_kept(temperature, top_k, top_p, vocab_size):
    return (temperature >= GREEDY_BELOW) & (has_top_k(top_k, vocab_size) | (top_p < 1))


@triton.jit
def tally_kernel(
    logits_ptr,
    largest_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    tallies_ptr,
    vocab_size,
    row_stride,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    TALLIES: tl.constexpr,
):
    """tallies [rows, TALLIES] i64, zero before the launch: per level the number of tokens that
    min_p keeps, and their mass if top_p determines the last kept token.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if has_last_kept(temperature, top_k, top_p, vocab_size):
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        largest = load_logit(row_ptr, tl.load(largest_ptr + row))
        least = least_scaled(tl.load(min_p_ptr + row))
        counts = tl.zeros([LEVELS], tl.int32)
        mass = tl.zeros([TILE], tl.int64)
        for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, vocab_size), TILE):
            token = start + tl.arange(0, TILE)
            x = load_logits(row_ptr, token, vocab_size)
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
    """Returns the first and the last level whose tokens must be listed."""
    level = tl.arange(0, LEVELS)
    counts = tl.load(tallies_ptr + level)
    if has_top_k(top_k, vocab_size):
        last = tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0)
        first = tl.where(top_p < 1, 0, last)  # top_p may end at any earlier level
    else:
        most = counts.to(tl.float64) * tl.exp(-level.to(tl.float64) / PER_UNIT)
        least = tl.where(
            level < LEVELS - 1,
            counts.to(tl.float64) * tl.exp(-(level + 1).to(tl.float64) / PER_UNIT),
            0.0,
        )
        spared = (1.0 - top_p).to(tl.float64) * tl.load(tallies_ptr + MASS).to(tl.float64) / UNIT
        # This level and those after it have more mass than top_p leaves out.
        is_before = tl.cumsum(least, axis=0, reverse=True) > spared * (1 + MARGIN)
        may_be_before = tl.cumsum(most, axis=0, reverse=True) > spared * (1 - MARGIN)
        first = tl.sum((is_before & (level > 0)).to(tl.int32), axis=0)
        last = tl.sum((may_be_before & (level > 0)).to(tl.int32), axis=0)
    return first, last


@triton.jit
def list_tile(order, mass, is_listed, tallies_ptr, orders_ptr, masses_ptr, CAPACITY: tl.constexpr):
    """Appends the tokens `is_listed` [TILE] to a row's lists, orders and masses [CAPACITY] i64,
    unordered. Those that find no place are only counted.
    """
    count = tl.sum(is_listed.to(tl.int32), axis=0)
    if count > 0:
        place = (
            tl.atomic_add(tallies_ptr + LISTED, count.to(tl.int64), sem="relaxed")
            + tl.cumsum(is_listed.to(tl.int32), axis=0)
            - 1
        )
        has_place = is_listed & (place < CAPACITY)
        tl.store(orders_ptr + place, order, mask=has_place)
        tl.store(masses_ptr + place, mass, mask=has_place)


@triton.jit
def weigh(at, tokens, scaling, vocab_size, MASSES: tl.constexpr, TILE: tl.constexpr):
    """-> i64: the number of tokens from `at` on (with MASSES their mass), the last of them, and the
    first of the tokens after them.

    tokens: whether they are listed, their number, pointers to their orders and masses, pointer to
    the row. scaling: largest logit, temperature, smallest scaled logit that min_p keeps.
    """
    is_listed, size, orders_ptr, masses_ptr, row_ptr = tokens
    largest, temperature, least = scaling
    total = tl.zeros([TILE], tl.int64)
    last = tl.full([TILE], HIGHEST, tl.int64)
    behind = tl.full([TILE], LOWEST, tl.int64)
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
    """Returns the last token of the shortest prefix that weighs at least `wanted`, searched between
    the orders low and high. The prefix that ends at low must weigh enough.
    """
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up
        total, last, behind = weigh(middle, tokens, scaling, vocab_size, MASSES, TILE)
        if total >= wanted:
            low = last
            high = tl.where(total == wanted, last, high)
        else:
            high = behind
    return low


@triton.jit
def listed_tokens(row_ptr, lists, vocab_size, CAPACITY: tl.constexpr):
    """-> `tokens` of weigh: a row's list or, if it was too short, the row."""
    tallies_ptr, orders_ptr, masses_ptr = lists
    num_listed = tl.load(tallies_ptr + LISTED, cache_modifier=".cg")
    is_listed = num_listed <= CAPACITY
    size = tl.where(is_listed, num_listed, vocab_size).to(tl.int32)
    return is_listed, size, orders_ptr, masses_ptr, row_ptr


@triton.jit
def find_last_kept(
    first, tokens, scaling, tallies_ptr, top_k, top_p, vocab_size, TILE: tl.constexpr
):
    """-> i64, the order of the last token that top_k and top_p keep. min_p may keep fewer.

    first: the order of the row's first token. The row must have a last kept one.
    """
    before = tl.where(tokens[0], tl.load(tallies_ptr + BEFORE, cache_modifier=".cg"), 0)
    mass = tl.load(tallies_ptr + MASS, cache_modifier=".cg")
    last = tl.full([], LOWEST, tl.int64)
    count, low, _ = weigh(LOWEST, tokens, scaling, vocab_size, False, TILE)
    if has_top_k(top_k, vocab_size):
        if before + count > top_k:
            low = search(low, first, top_k - before, tokens, scaling, vocab_size, False, TILE)
        if before + count >= top_k:
            last = low
        if top_p < 1:
            mass, _, _ = weigh(low, tokens, scaling, vocab_size, True, TILE)
    if top_p < 1:
        wanted = tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64) - before
        last = search(low, first, wanted, tokens, scaling, vocab_size, True, TILE)
    return last
