"""Divides contexts into pieces, and the pieces of a step's decodes among programs.

Must not know: what is computed of a piece.

A piece's ends depend on its position alone, not on the context's length: pieces have UNIT tokens up
to position 2 * PER_DOUBLING * UNIT, then twice as many up to twice that position, and so on. So a
token's attention is folded over the same pieces in a prompt, in any chunk of it, and as a decode. A
long context has few more pieces than a short one, and its longest is at most one in PER_DOUBLING of
it.

The programs of a KV head divide all decodes' pieces, request after request, into ranges of about
equal work, whatever the lengths of the contexts:

    requests     a: 5 pieces        | b | c: 3 pieces
    program 0    0   1   2          |   |
    program 1              3   4    | 0 |
    program 2                       |   | 0   1   2
"""

import triton
import triton.language as tl

UNIT = 256  # tokens, a multiple of every tile
PER_DOUBLING = 16  # a power of two

_UNIT = tl.constexpr(UNIT)
_PER_DOUBLING = tl.constexpr(PER_DOUBLING)
_BITS = tl.constexpr(PER_DOUBLING.bit_length() - 1)
SHARES = 16  # of programs, that a program of plan_kernel finds


def count_pieces(length: int) -> int:
    """Returns the number of pieces of a context."""
    unit = max(0, length - 1) // UNIT
    doublings = max(0, unit.bit_length() - PER_DOUBLING.bit_length())
    return PER_DOUBLING * doublings + (unit >> doublings) + 1


@triton.jit
def _doublings(unit):
    """The exponent of `unit` as an fp32 number, beyond that of PER_DOUBLING."""
    return tl.maximum((unit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127 - _BITS, 0)


@triton.jit
def piece_of(position):
    """-> the index of the piece that a position >= 0, i32, is in"""
    unit = position // _UNIT
    doublings = _doublings(unit)
    return doublings * _PER_DOUBLING + (unit >> doublings)


@triton.jit
def begin_of(piece):
    """-> the first position of a piece"""
    doublings = tl.maximum(piece // _PER_DOUBLING - 1, 0)
    return ((piece - doublings * _PER_DOUBLING) << doublings) * _UNIT


@triton.jit
def begins_piece(position):
    position = tl.cast(position, tl.int32)
    unit = position // _UNIT
    doublings = _doublings(unit)
    return position == ((unit >> doublings) << doublings) * _UNIT


@triton.jit(do_not_specialize=["num_requests", "num_programs"])
def plan_kernel(
    lengths_ptr,
    plan_ptr,
    num_requests,
    num_programs,
    REQUESTS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARES: tl.constexpr,
):
    """plan [num_programs + 1, 2] i32: the request and the piece at which a program's range begins,
    and the end of the last one's. Piece 0 means the first that the request sees.

    A request's work is its tiles, and one for its query and its result. A program's range begins
    with the first piece that begins at or after its share of the sum.
    """
    request = tl.arange(0, REQUESTS)
    is_request = request < num_requests
    length = tl.load(lengths_ptr + request, mask=is_request, other=0)
    first = tl.maximum(length - WINDOW, 0) // TILE if WINDOW else length * 0
    work = tl.where(is_request, tl.cdiv(length, TILE) - first + 1, 0)
    ends = tl.cumsum(work, 0)

    program = tl.program_id(0) * SHARES + tl.arange(0, SHARES)
    share = (program.to(tl.int64) * tl.sum(work, 0) // num_programs).to(tl.int32)
    is_before = is_request[None, :] & (ends[None, :] <= share[:, None])
    at = tl.sum(is_before.to(tl.int32), 1)
    into = share - tl.max(tl.where(is_before, ends[None, :], 0), 1)
    length = tl.load(lengths_ptr + at, mask=at < num_requests, other=0)
    first = tl.maximum(length - WINDOW, 0) // TILE if WINDOW else length * 0
    piece = piece_of(tl.maximum((first + into) * TILE - 1, 0)) + 1
    is_next = (into > 0) & (begin_of(piece) >= length)
    at = tl.where(is_next, at + 1, at)
    piece = tl.where((into == 0) | is_next, 0, piece)
    mask = program <= num_programs
    tl.store(plan_ptr + 2 * program, at, mask=mask)
    tl.store(plan_ptr + 2 * program + 1, piece, mask=mask)
