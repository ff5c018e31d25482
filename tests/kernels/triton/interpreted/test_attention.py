"""Paged attention in Triton's interpreter: lengths around every boundary, windows, soft-caps, and
bits that depend on the context alone.

Slots without an owner hold NaN, block tables end in blocks that do not exist, and results are NaN
until they are stored.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from quire.kernels.ops import AttentionMetadata
from quire.kernels.triton import attention
from quire.kernels.triton.attention import attend
from quire.tests.kernels.attention_cases import (
    FOREIGN_BLOCK,
    attention_case,
    context_slots,
    make_metadata,
    make_sinks,
    reference_attention,
)
from quire.tests.kernels.case import Case
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
TILE = 64  # keys per tile of decodes and prefills with heads of 64 in bf16


def root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def truth(case: Case, dtype: torch.dtype, window: int = 0, softcap: float = 0.0) -> Tensor:
    """Scores, caps, masks and sums of every query separately."""
    query, keys, values = (arg.to(dtype) for arg in case.args[:3])
    metadata, scale = case.args[3:5]
    group, out, token = query.shape[1] // keys.shape[2], torch.empty_like(query), 0
    for row, (query_len, length) in enumerate(zip(metadata.query_lens, metadata.seq_lens_list)):
        for position in range(length - query_len, length):
            first = max(position + 1 - window, 0) if window else 0
            where = tuple(
                index[first : position + 1] for index in context_slots(metadata, row, keys.shape[1])
            )
            k, v = (cache[where].repeat_interleave(group, 1) for cache in (keys, values))
            logits = torch.einsum("hd,khd->hk", query[token], k) * scale
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            out[token] = torch.einsum("hk,khd->hd", logits.softmax(-1), v)
            token += 1
    return out


def check_bf16(case: Case, **options) -> Tensor:
    """Error at most 1.5 times that of torch's own attention."""
    result, (exact,), (torchs,) = (
        attend(*case.args, **options),
        case.truth(torch.float64),
        case.truth(case.args[0].dtype),
    )
    assert root_mean_square(result.double() - exact) <= 1.5 * root_mean_square(
        torchs.double() - exact
    )
    return result


# a piece has two tiles
LENGTHS = [1, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1, 5 * TILE + 7]


def test_decodes_around_the_ends_of_tiles_and_pieces():
    torch.manual_seed(0)
    case = attention_case([1] * len(LENGTHS), LENGTHS, (7, 1, 64), 16, BF16)
    in_one = check_bf16(case, num_programs=2)
    assert torch.equal(attend(*case.args, num_programs=3, one_launch=False), in_one)


def test_a_decode_has_the_same_bits_in_any_batch():
    """Alone, among others, between requests of length 0 that pad a graph's batch, and with any
    number of programs that share it.
    """
    torch.manual_seed(1)
    query, keys, values, metadata, scale = attention_case(
        [1] * 3, [3, 6 * TILE + 5, 3 * TILE], (3, 1, 64), 32, BF16
    ).args
    expected = attend(query, keys, values, metadata, scale, num_programs=1)
    for num_programs, rows in ((2, [1]), (5, [2, -1, 1, -1, 0])):
        index = torch.tensor(rows)
        lengths = torch.where(index < 0, 0, metadata.seq_lens[index]).int()
        starts, slots = (
            torch.arange(len(rows) + 1, dtype=torch.int32),
            torch.zeros(len(rows), dtype=torch.int64),
        )
        # The host's lengths must not be used: under a graph they would be those of its capture.
        some = AttentionMetadata(
            starts, lengths, metadata.block_tables[index], slots, len(rows), [1] * len(rows), []
        )
        for one_launch in (True, False):
            result = attend(
                query[index],
                keys,
                values,
                some,
                scale,
                num_programs=num_programs,
                one_launch=one_launch,
            )
            assert torch.equal(
                result, torch.where((index < 0)[:, None, None], 0, expected[index])
            ), (num_programs, rows, one_launch)


def test_counters_are_reset_for_the_next_layer():
    torch.manual_seed(2)
    case = attention_case([1], [6 * TILE], (2, 1, 64), 16, BF16)
    first, second = attend(*case.args, num_programs=3), attend(*case.args, num_programs=3)
    assert torch.equal(first, second) and not first.isnan().any()
    (*_, counters) = next(
        value for key, value in case.args[3].scratch.items() if key[0] == "triton decode"
    )
    assert not counters.any()


def test_long_contexts_have_larger_pieces():
    """More than MAX_PIECES pieces of minimum size.

    Heads of 72 are padded to 128; their tiles in fp32 have 16 keys.
    """
    torch.manual_seed(3)
    assert (
        attention.decode_shape(2, 128, FP32)["TILE"] * attention.MIN_TILES * attention.MAX_PIECES
        == 1024
    )
    case = attention_case([1], [1100], (2, 1, 72), 8, FP32)
    assert (
        root_mean_square(attend(*case.args, num_programs=4) - case.truth(torch.float64)[0]) < 1e-6
    )


def test_prefills_around_the_ends_of_blocks_and_tiles():
    """A program handles 18 tokens of 7 query heads."""
    torch.manual_seed(4)
    assert attention.prefill_shape(7, 64, BF16, 90)["ROWS"] // 7 == 18
    check_bf16(
        attention_case(
            [1, 17, 18, 19, 2], [TILE + 1, 17, TILE, TILE + 1, 2 * TILE + 1], (7, 1, 64), 16, BF16
        )
    )


def test_chunks_equal_the_whole():
    """Up to a step of bf16: the sums of numpy's matrix product depend on the row's index."""
    torch.manual_seed(5)
    total, block_size = 150, 16
    query, keys, values, whole, scale = attention_case(
        [total], [total], (4, 1, 64), block_size, BF16
    ).args
    for window in (0, 50):
        expected, start = attend(query, keys, values, whole, scale, sliding_window=window), 0
        for size in (1, 30, 33, 2, 84):
            end = start + size
            chunk = make_metadata([size], [end], block_size, 16)
            chunk = replace(chunk, block_tables=whole.block_tables, num_decodes=0)
            result = attend(query[start:end], keys, values, chunk, scale, sliding_window=window)
            torch.testing.assert_close(result, expected[start:end], rtol=2**-7, atol=2**-12)
            start = end


@pytest.mark.parametrize(
    ("window", "softcap"), [(1, 0.0), (40, 2.0), (64, 0.0), (1000, 0.0), (0, 2.0)]
)
def test_windows_and_softcaps(window, softcap):
    """Decodes and prefills; tiles have 32 keys.

    Keys before all windows may hold anything, in blocks that do not exist any more.
    """
    torch.manual_seed(6)
    query_lens, lengths = [1, 1, 3, 20], [5, 150, 100, 20]
    case = attention_case(query_lens, lengths, (3, 1, 48), 8, FP32)
    expected = truth(case, torch.float64, window, softcap)
    metadata = case.args[3]
    for row, (query_len, length) in enumerate(zip(query_lens, lengths)):
        gone = max(length - query_len + 1 - window, 0) if window else 0
        where = tuple(index[:gone] for index in context_slots(metadata, row, 8))
        if row == 1:  # in prefills the block of a tile is looked up before masking
            for cache in case.args[1:3]:
                cache[where] = math.nan
            metadata.block_tables[row, : gone // 8] = FOREIGN_BLOCK
    assert (
        root_mean_square(
            attend(*case.args, sliding_window=window, softcap=softcap, num_programs=2) - expected
        )
        < 1e-6
    )


def test_sinks():
    """They join the first state of a decode's pieces, or a prefill's rows, however many programs
    share a request, and in padding requests give zeros.
    """
    torch.manual_seed(10)
    sinks = make_sinks(3)
    case = attention_case([1, 1, 20], [2, 300, 70], (3, 1, 48), 8, FP32, 40, 0.0, sinks)
    (exact,) = case.truth(torch.float64)
    for num_programs, one_launch in ((1, True), (3, True), (3, False)):
        result = attend(*case.args, num_programs=num_programs, one_launch=one_launch)
        assert root_mean_square(result - exact) < 1e-6
    query, keys, values, metadata, *rest = case.args
    empty = replace(metadata, seq_lens=torch.zeros_like(metadata.seq_lens), query_lens=[1, 1])
    assert not attend(query[:2], keys, values, empty, *rest, num_programs=2).any()


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [(80, 128, torch.float16), (96, 64, BF16), (256, 8, BF16), (8, 1, torch.float16)],
    ids=str,
)
def test_heads_and_blocks_of_other_sizes(head_dim, block_size, dtype):
    """With blocks of 64 or more, one look-up serves a tile."""
    torch.manual_seed(7)
    check_bf16(attention_case([1, 5], [70, 133], (4, 2, head_dim), block_size, dtype))


def test_an_fp8_cache():
    """As a bf16 cache that holds the same numbers, rounded to fp8 and scaled. An fp8 NaN in unused
    slots has no effect either.
    """
    torch.manual_seed(9)
    query, keys, values, metadata, scale = attention_case(
        [1, 12], [200, 70], (4, 2, 64), 16, BF16
    ).args
    small = [(cache * 4).to(torch.float8_e4m3fn) for cache in (keys, values)]
    result = attend(query, *small, metadata, scale, key_scale=0.25, value_scale=0.5)
    same = Case(
        "fp8",
        (query, small[0].to(BF16) / 4, small[1].to(BF16) / 2, metadata, scale),
        reference_attention,
    )
    exact, torchs = same.truth(torch.float64)[0], same.truth(BF16)[0]
    assert root_mean_square(result.double() - exact) <= 1.5 * root_mean_square(
        torchs.double() - exact
    )


def test_a_capture_uses_no_buffers_of_the_preceding_run(monkeypatch):
    """The buffers of the run before it are in the metadata's scratch and freed with the metadata,
    while the graph continues to exist.
    """
    query, keys, values, metadata, scale = attention_case([1], [300], (2, 1, 64), 16, BF16).args
    attend(query, keys, values, metadata, scale, num_programs=2)
    before = {tensor.data_ptr() for tensors in metadata.scratch.values() for tensor in tensors}
    used = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(
        attention,
        "decode_kernel",
        type(
            "Kernel", (), {"__getitem__": lambda self, grid: lambda *args, **_: used.extend(args)}
        )(),
    )
    on_gpu = query.as_subclass(type("OnGpu", (Tensor,), {"is_cuda": True}))
    attend(on_gpu, keys, values, metadata, scale, num_programs=2)
    assert used and not before & {arg.data_ptr() for arg in used if isinstance(arg, Tensor)}


def test_caches_that_are_views():
    torch.manual_seed(8)
    query, keys, values, metadata, scale = attention_case(
        [1, 4], [40, 70], (2, 2, 64), 16, BF16
    ).args
    both = torch.stack((keys, values), 1)  # [num_blocks, 2, block_size, NKV, D]
    expected = attend(query, keys, values, metadata, scale)
    assert torch.equal(attend(query, both[:, 0], both[:, 1], metadata, scale), expected)


def test_arguments_out_of_range_are_refused():
    args = attention_case([1], [1], (1, 1, 64), 16, BF16).args
    for bad in ({"sliding_window": -1}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match="at least 0"):
            attend(*args, **bad)
    with pytest.raises(ValueError, match="scale must be positive"):
        attend(*args[:4], -0.1)
