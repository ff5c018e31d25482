"""Attention that folds the same pieces in a prompt and as a decode: how contexts are cut, how
decodes are divided among programs, and that a token's bits are the same everywhere.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from quire.kernels.ops import AttentionMetadata
from quire.kernels.triton import attention, attention_pieces
from quire.kernels.triton.attention import attend
from quire.kernels.triton.attention_pieces import UNIT, count_pieces
from quire.tests.kernels.attention_cases import attention_case, make_metadata, make_sinks
from quire.tests.kernels.triton.guard import unordered
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
TILE = 64  # keys


@triton.jit
def pieces_kernel(pieces_ptr, begins_ptr, is_begin_ptr, SIZE: tl.constexpr):
    position = tl.arange(0, SIZE)
    piece = attention_pieces.piece_of(position)
    tl.store(pieces_ptr + position, piece)
    tl.store(begins_ptr + position, attention_pieces.begin_of(piece))
    is_begin = attention_pieces.begins_piece(position)
    tl.store(is_begin_ptr + position, is_begin.to(tl.int32))


def test_pieces_follow_each_other_and_grow():
    """Up to 128 Ki tokens; a piece that is not of the least size is at most 1/16 of what is before
    it.
    """
    size = 2**17
    piece, begin, is_begin = (torch.empty(size, dtype=torch.int32) for _ in range(3))
    with unordered():
        pieces_kernel[1,](piece, begin, is_begin, SIZE=size)
    begins = torch.arange(size)[is_begin.bool()]
    assert torch.equal(begin.long(), begins[piece.long()])
    assert torch.equal(piece.long(), is_begin.cumsum(0) - 1)
    sizes = begins.diff()
    assert (sizes >= UNIT).all()
    assert ((sizes == UNIT) | (sizes * attention_pieces.PER_DOUBLING <= begins[:-1])).all()
    assert [count_pieces(length) for length in (0, 1, size)] == [1, 1, len(begins)]
    for length in (UNIT, UNIT + 1, 8192, 8193, 8193 + 512, 100_000):
        assert count_pieces(length) == piece[length - 1] + 1


# first positions of pieces
BEGINS = [0, *(b for b in range(UNIT, 2**17, UNIT) if count_pieces(b + 1) > count_pieces(b))]


@pytest.mark.parametrize("window", [0, 1, 300, 5000])
@pytest.mark.parametrize("num_programs", [1, 17, 528])
def test_programs_divide_the_work(num_programs, window):
    """Every piece of every request is in the range of one program, in order, and no program has
    more work than its share and a piece.
    """
    generator = torch.Generator().manual_seed(num_programs + window)
    lengths = torch.randint(0, 20_000, (29,), generator=generator).int()
    lengths[::5] = torch.tensor([0, 1, 256, 257, 131_072, 0])
    unused = torch.empty(0, dtype=torch.int32)
    metadata = AttentionMetadata(unused, lengths, unused, unused, 29, [1] * 29, [])
    plan = attention._plan_once(metadata, num_programs, TILE, window)
    ranges = [tuple(row) for row in plan.tolist()]
    first_tiles = (lengths - window).clamp(min=0) // TILE if window else lengths * 0
    work, place = {}, 0  # the place of each piece in the sum of all work
    for request, (length, first_tile) in enumerate(zip(lengths.tolist(), first_tiles.tolist())):
        work[request, 0] = place
        for piece in range(count_pieces(first_tile * TILE + 1), count_pieces(length)):
            work[request, piece] = place + BEGINS[piece] // TILE - first_tile
        place += -(-length // TILE) - first_tile + 1
    keys = [*work, (29, 0)]
    assert ranges[0] == (0, 0) and ranges[-1] == (29, 0) and ranges == sorted(ranges)
    for program, key in enumerate(ranges):
        expected = next((k for k in work if work[k] >= program * place // num_programs), (29, 0))
        assert key in keys and key == expected


@pytest.mark.slow
def test_long_contexts_have_larger_pieces(monkeypatch):
    """Heads of 72 are padded to 128; their tiles in fp32 have 16 keys."""
    torch.manual_seed(3)
    monkeypatch.setattr(attention_pieces, "_UNIT", tl.constexpr(64))
    monkeypatch.setattr(attention_pieces, "UNIT", 64)
    length = 2 * attention_pieces.PER_DOUBLING * 64 + 2 * 64 + 30
    assert count_pieces(length) == 2 * attention_pieces.PER_DOUBLING + 2
    case = attention_case([1], [length], (2, 1, 72), 8, FP32)
    result = attend(*case.args, num_programs=40, is_invariant=True)
    assert (result - case.truth(torch.float64)[0]).square().mean().sqrt() < 1e-6


@pytest.mark.parametrize(
    ("window", "softcap", "dtype", "sinks"),
    [
        (300, 0.0, BF16, True),
        pytest.param(0, 0.0, BF16, False, marks=pytest.mark.slow),
        pytest.param(0, 3.0, FP32, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_in_any_chunk(window, softcap, dtype, sinks, ordered_dots):
    """Of a prompt, and as a decode alone and beside others. The fault that this would find is a
    prompt that is not folded by pieces.
    """
    torch.manual_seed(11)
    total, heads = 2 * UNIT + 30, (2, 1, 48)
    query, keys, values, whole, scale = attention_case([total], [total], heads, 16, dtype).args
    options = {"sliding_window": window, "softcap": softcap, "is_invariant": True}
    options["sinks"] = make_sinks(2) if sinks else None
    expected = attend(query, keys, values, whole, scale, **options)

    def chunk(*positions: tuple[int, int]) -> Tensor:
        """The results of ranges of the prompt, each as a request; those of one token are decodes"""
        lens = [end - begin for begin, end in positions]
        some = make_metadata(lens, [end for _, end in positions], 16, 200)
        tables = whole.block_tables.expand(len(lens), -1)
        some = replace(some, block_tables=tables, num_decodes=sum(n == 1 for n in lens))
        of_chunks = torch.cat([query[begin:end] for begin, end in positions])
        return attend(of_chunks, keys, values, some, scale, **options, num_programs=3)

    last = total - 1
    for positions in ([(last, total)], [(5, 6), (last, total), (UNIT - 3, UNIT + 60)]):
        result = chunk(*positions)
        assert torch.equal(result, torch.cat([expected[begin:end] for begin, end in positions]))
    options["is_invariant"] = False
    assert not torch.equal(attend(query, keys, values, whole, scale, **options), expected)
