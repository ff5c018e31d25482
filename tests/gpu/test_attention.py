"""Paged attention on a GPU: what the interpreter cannot show, the hand-over between a decode's
programs and replays of a graph. Skipped without a GPU.

Also run under compute-sanitizer (run.py --only racecheck). Racecheck checks shared memory; the
hand-over uses global memory, where only repetition can find errors.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quire.kernels.ops import AttentionMetadata
from quire.tests.kernels.attention_cases import attention_case, make_metadata
from quire.tests.kernels.case import Case
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from quire.kernels.triton.attention import attend


def on_gpu(case: Case) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata, float]:
    query, keys, values, metadata, scale = case.args
    names = ("query_start_loc", "seq_lens", "block_tables", "slot_mapping")
    metadata = replace(
        metadata, **{name: getattr(metadata, name).cuda() for name in names}, scratch={}
    )
    return query.cuda(), keys.cuda(), values.cuda(), metadata, scale


@pytest.mark.parametrize(
    ("num_requests", "length", "heads"),
    [(1, 8000, (28, 4, 128)), (7, 1500, (14, 2, 64)), (60, 700, (16, 8, 128))],
    ids=str,
)
def test_a_state_that_is_handed_over_is_complete(num_requests, length, heads):
    """10,000 launches that share one set of counters, next to another stream that keeps the caches
    busy, against the merge in a second launch.
    """
    torch.manual_seed(0)
    args = on_gpu(
        attention_case(
            [1] * num_requests,
            [length - 11 * i for i in range(num_requests)],
            heads,
            16,
            torch.bfloat16,
        )
    )
    expected = attend(*args, one_launch=False)
    assert not expected.isnan().any()
    noise, other = torch.zeros(2**26, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(10_000):
        if i % 10 == 0:
            with torch.cuda.stream(other):
                noise.add_(1)
        num_programs = (None, 2, 5, 32)[i % 4]
        wrong += (attend(*args, num_programs=num_programs) != expected).any()
    assert wrong.item() == 0


def test_a_state_is_handed_over_once():
    """One or two launches for compute-sanitizer, under which many would take hours."""
    torch.manual_seed(3)
    args = on_gpu(attention_case([1] * 3, [700, 300, 65], (14, 2, 64), 16, torch.bfloat16))
    assert torch.equal(attend(*args, num_programs=4), attend(*args, one_launch=False))


def test_a_graph_works_for_other_lengths():
    """Captured with some lengths, replayed with others, padding included."""
    torch.manual_seed(1)
    query, keys, values, metadata, scale = on_gpu(
        attention_case([1] * 8, [30 + 150 * i for i in range(8)], (14, 2, 64), 16, torch.bfloat16)
    )
    expected = attend(query, keys, values, metadata, scale)
    lengths = metadata.seq_lens.clone()
    metadata = replace(metadata, scratch={}, seq_lens_list=[])
    attend(query, keys, values, metadata, scale)
    metadata.seq_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(query, keys, values, metadata, scale)
    metadata.scratch.clear()
    for padding in (0, 3):
        metadata.seq_lens.copy_(lengths)
        metadata.seq_lens[8 - padding :] = 0
        for _ in range(3):
            graph.replay()
        assert (
            torch.equal(out[: 8 - padding], expected[: 8 - padding])
            and not out[8 - padding :].any()
        )


def test_a_chunk_has_the_bits_of_the_whole():
    """On a GPU a row's matrix products and sums have one order, at any place in a block."""
    torch.manual_seed(2)
    query, keys, values, whole, scale = on_gpu(
        attention_case([700], [700], (14, 2, 64), 16, torch.bfloat16)
    )
    expected, start = attend(query, keys, values, whole, scale), 0
    for size in (1, 30, 33, 2, 300, 334):
        chunk = make_metadata([size], [start + size], 16, 64)
        chunk = replace(
            chunk,
            query_start_loc=chunk.query_start_loc.cuda(),
            seq_lens=chunk.seq_lens.cuda(),
            block_tables=whole.block_tables,
            num_decodes=0,
        )
        assert torch.equal(
            attend(query[start : start + size], keys, values, chunk, scale),
            expected[start : start + size],
        )
        start += size


@pytest.mark.parametrize(
    ("heads", "dtype", "window"),
    [
        ((14, 2, 64), torch.bfloat16, 0),
        ((28, 4, 128), torch.bfloat16, 0),
        ((28, 4, 128), torch.float16, 300),
        ((8, 4, 256), torch.bfloat16, 0),
        ((8, 1, 512), torch.bfloat16, 0),
        ((8, 4, 64), torch.float32, 0),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_in_a_prompt_and_as_a_decode(heads, dtype, window):
    """Only a GPU can show it: the tensor cores' sums, and the order in which threads add a row, may
    depend on the shape of a tile.
    """
    torch.manual_seed(4)
    total, block_size = 1100, 16
    query, keys, values, whole, scale = on_gpu(
        attention_case([total], [total], heads, block_size, dtype)
    )
    options = {"sliding_window": window, "is_invariant": True}
    expected = attend(query, keys, values, whole, scale, **options)
    where = torch.tensor([0, 1, 63, 64, 255, 256, 257, 700, 1023, 1024, total - 1])
    lengths = (where + 1).tolist()
    decodes = make_metadata([1] * len(where), lengths, block_size, 70 * len(where))
    names = ("query_start_loc", "seq_lens", "slot_mapping")
    decodes = replace(
        decodes,
        **{name: getattr(decodes, name).cuda() for name in names},
        block_tables=whole.block_tables.expand(len(where), -1).contiguous(),
        scratch={},
    )
    for num_programs in (None, 1, 5):
        result = attend(
            query[where.cuda()], keys, values, decodes, scale, **options, num_programs=num_programs
        )
        assert torch.equal(result, expected[where.cuda()]), num_programs
