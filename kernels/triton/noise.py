"""Computes Gumbel noise in Triton. The Philox numbers equal the reference's bit by bit; the
logarithms agree up to rounding.

Must not know: models, requests, what is drawn with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cuda

TILE = 1024  # tokens per program
LARGEST_U = tl.constexpr(1 - 2**-24)
STEP = tl.constexpr(2**-32)  # the step of u


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """A counter of four words and a key of two, all u32 -> four random words. Ten rounds."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def uniform_of(words):
    return tl.minimum((words.to(tl.float32) + 0.5) * STEP, LARGEST_U)


@triton.jit
def uniform(start, seed, position, SIZE: tl.constexpr):
    """u [SIZE] of the tokens start, start + 1, ...; start is a multiple of 4.

    The thread of a group of four tokens computes the group's four words.
    """
    quads = (start // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
    zeros = tl.zeros_like(quads)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    seed_low, seed_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1, c2, c3 = philox4x32(
        quads, zeros + low, zeros + high, zeros, zeros + seed_low, zeros + seed_high
    )
    words = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    return uniform_of(words)


@triton.jit
def uniform_at(token, seed, position):
    """u of the tokens [SIZE] in any order, with four times the work of `uniform`."""
    zeros = tl.zeros_like(token).to(tl.uint32)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    seed_low, seed_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1, c2, c3 = philox4x32(
        (token // 4).to(tl.uint32),
        zeros + low,
        zeros + high,
        zeros,
        zeros + seed_low,
        zeros + seed_high,
    )
    place = token % 4
    words = tl.where(place < 2, tl.where(place == 0, c0, c1), tl.where(place == 2, c2, c3))
    return uniform_of(words)


@triton.jit
def gumbel(u):
    """-log(-log1p(-u)).

    log1p corrects log(1 - u) by the ratio of u to the part of it that survives the rounding of 1 -
    u (Kahan).
    """
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    return -tl.log(tl.where(rest == 1.0, u, -tl.log(rest) * tl.div_rn(u, lost)))


@triton.jit
def random_gumbel_kernel(seeds_ptr, positions_ptr, out_ptr, num_tokens, TILE: tl.constexpr):
    row, start = tl.program_id(0), tl.program_id(1) * TILE
    noise = gumbel(uniform(start, tl.load(seeds_ptr + row), tl.load(positions_ptr + row), TILE))
    tokens = start + tl.arange(0, TILE)
    tl.store(out_ptr + row.to(tl.int64) * num_tokens + tokens, noise, mask=tokens < num_tokens)


@register("random_gumbel", name="triton", predicate=is_cuda, priority=PRIORITY)
def random_gumbel(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    out = torch.empty(len(seeds), num_tokens, dtype=torch.float32, device=seeds.device)
    grid = (len(seeds), triton.cdiv(num_tokens, TILE))
    random_gumbel_kernel[grid](
        seeds.contiguous(),
        positions.contiguous(),
        out,
        num_tokens,
        TILE=TILE,
        enable_fp_fusion=False,
    )
    return out
