"""Native attention, rotary embedding and KV writes: a token's bits do not depend on how the
computation was divided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.kernels.cpu.native.library import library
from quire.kernels.ops import AttentionMetadata, kv_cache_row
from quire.kernels.reference.kv_cache import parts
from quire.kernels.registry import Facts
from quire.tests.kernels.attention_cases import (
    FOREIGN_BLOCK,
    attention_case,
    make_sinks,
    reference_attention,
)
from quire.tests.kernels.case import Case, rand
from torch import Tensor
from torch.nn.attention import SDPBackend

if library is None:
    pytest.skip(
        "native kernels are not built here (no C++ compiler at installation, QUIRE_NATIVE=0, or no "
        "AVX2)",
        allow_module_level=True,
    )

from quire.kernels.cpu.native import attention, rotary
from quire.kernels.cpu.native.calls import Op, Rotary, RotaryAndWriteKv, Step, WriteKv
from quire.kernels.cpu.native.tensors import CACHE_DTYPES, MAX_HEAD_DIM
from quire.kernels.cpu.native.tensors import DTYPES as CALL_DTYPES

DTYPES = (torch.float32, torch.bfloat16)
# dtypes of activations and of the cache
KINDS = [(dtype, cache_dtype) for dtype in DTYPES for cache_dtype in (dtype, torch.int8)]
TILE = 64  # keys, src/attention_tile.inl
SPLIT = 512  # src/attention.inl: longer contexts are summed in pieces


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    library.set_num_threads(1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    word = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.int8: torch.int8}[
        a.dtype
    ]
    return torch.equal(a.contiguous().view(word), b.contiguous().view(word))


@dataclass
class Request:
    """All tokens of a sequence: query [n, NQ, D], key and value [n, NKV, D]; their expected output
    [n, NQ, D] with a cache of that type; the number computed so far.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    expected: Tensor
    cache_dtype: torch.dtype
    computed: int = 0


class Cache:
    """A paged cache where all slots that were not written hold NaN, with blocks in random order and
    invalid entries at the end of block tables.
    """

    def __init__(self, requests: list[Request], block_size: int, is_apart: bool = False):
        """is_apart: a block's keys and values are adjacent, so that blocks of keys are apart."""
        self.block_size = block_size
        counts = [-(-len(r.query) // block_size) for r in requests]
        num_kv_heads, head_dim = requests[0].key.shape[1:]
        dtype = requests[0].cache_dtype
        num_blocks, row = sum(counts) + 2, kv_cache_row(head_dim, dtype)
        shape = [num_blocks, block_size, num_kv_heads, row]
        shape.insert(int(is_apart), 2)
        nan = -1 if dtype == torch.int8 else math.nan  # all bits are set, in the scale too
        self.keys, self.values = torch.full(shape, nan, dtype=dtype).unbind(int(is_apart))
        pages = torch.randperm(num_blocks, dtype=torch.int32)[: sum(counts)].split(counts)
        self.tables = torch.full((len(requests), max(counts) + 1), FOREIGN_BLOCK, dtype=torch.int32)
        for table, own in zip(self.tables, pages):
            table[: len(own)] = own

    def corrupt(self, what: str, row: int, position: int) -> None:
        cache, (block, offset) = getattr(self, what), divmod(position, self.block_size)
        block = self.tables[row, block].item()
        if cache.dtype == torch.int8:
            parts(cache)[1][block, :, offset] = math.nan
        else:
            cache[block, offset] = math.nan

    def step(
        self, requests: list[Request], rows: list[int], sizes: list[int], options: tuple = ()
    ) -> list[Tensor]:
        """Computes the next sizes[i] tokens of request rows[i], as the engine does; returns each
        one's result.
        """
        ends = [requests[row].computed + size for row, size in zip(rows, sizes)]
        query, slots = [], []
        for row, size, end in zip(rows, sizes, ends):
            request, position = requests[row], torch.arange(end - size, end)
            slots.append(
                self.tables[row].long()[position // self.block_size] * self.block_size
                + position % self.block_size
            )
            rotary.reshape_and_cache(
                request.key[end - size : end],
                request.value[end - size : end],
                self.keys,
                self.values,
                slots[-1],
            )
            query.append(request.query[end - size : end])
            request.computed = end
        starts, lengths = (
            torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32),
            torch.tensor(ends, dtype=torch.int32),
        )
        metadata = AttentionMetadata(
            starts, lengths, self.tables[rows], torch.cat(slots), 0, sizes, ends
        )
        scale = request.query.shape[-1] ** -0.5
        return list(
            attention.paged_attention(
                torch.cat(query), self.keys, self.values, metadata, scale, *options
            ).split(sizes)
        )


def make_request(
    length: int,
    heads: tuple[int, int, int],
    kind: tuple[torch.dtype, torch.dtype],
    options: tuple = (),
) -> Request:
    """Options: sliding_window, softcap and sinks.

    The expected output is that of a single thread that computes the tokens one by one, without
    other requests.
    """
    (num_heads, num_kv_heads, head_dim), (dtype, cache_dtype) = heads, kind
    query = rand(length, num_heads, head_dim, dtype=dtype)
    key, value = (rand(length, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    request = Request(query, key, value, torch.empty_like(query), cache_dtype)
    library.set_num_threads(1)
    cache = Cache([request], 16)
    for token in range(length):
        (request.expected[token : token + 1],) = cache.step([request], [0], [1], options)
    request.computed = 0
    return request


def check_in_steps(requests: list[Request], block_size: int, draw, options: tuple = ()) -> None:
    """Computes all tokens of all requests in steps of some requests with some tokens each;
    `draw(n)` returns an integer from 0 to n.
    """
    cache = Cache(requests, block_size)
    while open_rows := [i for i, r in enumerate(requests) if r.computed < len(r.query)]:
        rows = [row for row in open_rows if draw(3)] or open_rows[:1]
        sizes = [1 + draw(len(requests[row].query) - requests[row].computed - 1) for row in rows]
        library.set_num_threads(1 + draw(2))
        for row, size, result in zip(rows, sizes, cache.step(requests, rows, sizes, options)):
            request = requests[row]
            start = request.computed - size
            assert same_bits(result, request.expected[start : request.computed]), (
                f"request {row}, tokens {start} to {request.computed}"
            )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_token_is_the_same_bits_in_any_chunk_batch_and_pool(kind, data):
    num_kv_heads, group = data.draw(
        st.sampled_from([(1, 1), (2, 2), (2, 3), (2, 7), (1, 8), (3, 1)])
    )
    head_dims = [16, 48, 64, 80] if kind[1] == torch.int8 else [8, 24, 64, 72]
    heads = (num_kv_heads * group, num_kv_heads, data.draw(st.sampled_from(head_dims)))
    lengths = data.draw(
        st.lists(
            st.one_of(st.integers(1, 150), st.sampled_from([64, 65, 128])), min_size=1, max_size=4
        )
    )
    torch.manual_seed(sum(lengths))
    options = data.draw(st.sampled_from([(), (), (1,), (40,), (64, 3.0), (0, 1.5)]))
    if options and data.draw(st.booleans()):
        options = (*options, 0.0)[:2] + (make_sinks(heads[0]),)
    requests = [make_request(length, heads, kind, options) for length in lengths]
    check_in_steps(
        requests,
        data.draw(st.sampled_from([1, 5, 8, 16, 32, 128])),
        lambda n: data.draw(st.integers(0, n)),
        options,
    )


@pytest.mark.parametrize("kind", KINDS[2:], ids=str)
def test_items_of_some_heads_and_some_pieces(kind):
    """A decode over a long context, in pieces, with a window and sinks, beside short ones. An item
    has several KV heads, the last one fewer.
    """
    torch.manual_seed(13)
    options = (4 * SPLIT + 9, 0.0, make_sinks(10))
    requests = [make_request(length, (10, 5, 32), kind, options) for length in (6 * SPLIT, 40, 3)]
    cache = Cache(requests, 16)
    library.set_num_threads(2)
    cache.step(requests, [0, 1, 2], [len(request.query) - 2 for request in requests], options)
    for _ in range(2):
        for request, result in zip(
            requests, cache.step(requests, [0, 1, 2], [1, 1, 1], options), strict=True
        ):
            assert same_bits(result, request.expected[request.computed - 1 : request.computed])


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_requests_without_tokens_take_no_part(kind, num_threads):
    """As in rows that pad a batch, with and without a context."""
    torch.manual_seed(12)
    requests = [make_request(30, (6, 2, 32), kind) for _ in range(3)]
    cache = Cache(requests, 16)
    for sizes in ([0, 0, 0], [5, 0, 7], [1, 3, 1], [1, 0, 1], [0, 0, 1], [0, 0, 0]):
        library.set_num_threads(num_threads)
        for request, size, result in zip(
            requests, sizes, cache.step(requests, [0, 1, 2], sizes), strict=True
        ):
            assert same_bits(result, request.expected[request.computed - size : request.computed])


@pytest.mark.sampled
@pytest.mark.parametrize("options", [(), (70,), (SPLIT + 5, 4.0, make_sinks(6))], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_contexts_that_are_summed_in_pieces(kind, options):
    torch.manual_seed(10)
    requests = [
        make_request(length, (6, 2, 32), kind, options)
        for length in (SPLIT + 70, 2 * SPLIT + 9, 30)
    ]
    for attempt in range(1 if options else 3):
        for request in requests:
            request.computed = 0
        check_in_steps(requests, 16, lambda n: int(torch.randint(n + 1, ())), options)


def test_the_bits_are_the_same_on_every_instruction_set(isa):
    for kind in KINDS:
        for options in ((), (20, 2.0, make_sinks(6))):
            torch.manual_seed(11)
            requests = [
                make_request(length, (6, 2, 48 if kind[1] == torch.int8 else 40), kind, options)
                for length in (90, 33, 17)
            ]
            check_in_steps(requests, 16, lambda n: int(torch.randint(n + 1, ())), options)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_largest_heads_in_blocks_that_are_apart(isa, kind):
    torch.manual_seed(13)
    request = make_request(150, (4, 2, MAX_HEAD_DIM), kind, (70,))
    for sizes in ([150], [9, 1, 64, 76]):
        request.computed, cache = 0, Cache([request], 16, is_apart=True)
        results = [cache.step([request], [0], [size], (70,))[0] for size in sizes]
        assert same_bits(torch.cat(results), request.expected), sizes


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_non_finite_values_do_not_affect_earlier_tokens(isa, kind, bad, what):
    torch.manual_seed(12)
    request = make_request(100, (4, 2, 48 if kind[1] == torch.int8 else 24), kind)
    getattr(request, what)[77] = bad
    (result,) = Cache([request], 8).step([request], [0], [100])
    assert same_bits(result[:77], request.expected[:77])
    if bad != -math.inf or what == "value":
        assert not result[77:].isfinite().any(-1).all()


@pytest.mark.sampled
@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_before_a_window_have_no_effect(isa, kind, what):
    """Tokens whose windows have passed a NaN have the same bits as without it; tiles before all
    windows are not read.
    """
    torch.manual_seed(17)
    window, length, bad = 30, 150, 77
    request = make_request(length, (4, 2, 48 if kind[1] == torch.int8 else 24), kind, (window,))
    cache = Cache([request], 8)
    cache.step([request], [0], [100], (window,))
    cache.corrupt(what, 0, bad)
    request.computed = 90  # keys and values of these ten are written again, the NaN stays
    (result,) = cache.step([request], [0], [60], (window,))
    unspoilt = slice(bad + window - 90, None)
    assert (
        same_bits(result[unspoilt], request.expected[90:][unspoilt])
        and result[: unspoilt.start].isnan().all()
    )
    cache.tables[0, : (length - window) // TILE * TILE // 8] = FOREIGN_BLOCK
    request.computed = length - 1
    assert same_bits(cache.step([request], [0], [1], (window,))[0], request.expected[-1:])


@pytest.mark.sampled
@pytest.mark.parametrize("heads", [(14, 2, 64), (2, 1, 256)], ids=str)
@pytest.mark.parametrize(
    ("query_lens", "contexts"), [([1], [16384]), ([1, 1], [5, 9001]), ([20], [8200])], ids=str
)
def test_long_contexts(isa, heads, query_lens, contexts):
    """The error is no larger than that of torch's flash attention, which also has probabilities in
    bf16. One thread, and two that share a context, give the same bits.
    """
    torch.manual_seed(13)
    for dtype in DTYPES:
        case = attention_case(query_lens, contexts, heads, 16, dtype)
        (truth,) = case.truth(torch.float64)
        library.set_num_threads(1)
        (result,) = case.run(attention.paged_attention)
        library.set_num_threads(2)
        assert same_bits(result, *case.run(attention.paged_attention))
        (own,) = reference_attention(*case.args, backend=SDPBackend.FLASH_ATTENTION)
        worst = (
            1e-6 if dtype == torch.float32 else 1.05 * (own.double() - truth).square().mean().sqrt()
        )
        assert (result.double() - truth).square().mean().sqrt() < worst


def test_large_scores_are_exact_enough():
    """Softmax over scores of several hundred: all weight is on few keys, nothing overflows."""
    torch.manual_seed(14)
    case = attention_case([3, 1], [300, 90], (4, 2, 64), 16, torch.float32)
    large = Case(case.name, (case.args[0] * 100, *case.args[1:]), case.torch_own)
    torch.testing.assert_close(
        large.run(attention.paged_attention)[0].double(),
        large.truth(torch.float64)[0],
        rtol=1e-3,
        atol=1e-3,
    )


def test_a_sink_without_weight_changes_nothing_and_one_with_all_weight_leaves_zeros(isa):
    torch.manual_seed(18)
    for dtype in DTYPES:
        case = attention_case([3, 1], [SPLIT + 60, 90], (4, 2, 64), 16, dtype)
        (plain,) = case.run(attention.paged_attention)
        for sink, expected in ((-math.inf, plain), (1e30, torch.zeros_like(plain))):
            sinks = torch.full((4,), sink)
            assert torch.equal(attention.paged_attention(*case.args, sinks=sinks), expected), sink


def test_unsupported_heads_are_declined():
    assert [
        d for d in range(600) if attention.has_native_heads(Facts("cpu", torch.float32, head_dim=d))
    ] == list(range(8, 513, 8))
    assert not attention.has_native_heads(Facts("cuda", torch.bfloat16, head_dim=64))
    assert not attention.has_native_heads(Facts("cpu", torch.float16, head_dim=64))
    in_int8 = [
        d
        for d in range(600)
        if attention.has_native_heads(
            Facts("cpu", torch.bfloat16, head_dim=d, kv_cache_dtype=torch.int8)
        )
    ]
    assert in_int8 == list(range(16, 513, 16))


# ---------------------------------------------------------------- rotary embedding and KV writes


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rotary_dim", [64, 48, 8])
def test_fused_rotation_and_write_have_the_bits_of_the_two(isa, kind, rotary_dim):
    torch.manual_seed(15)
    dtype, cache_dtype = kind
    num_tokens, num_heads, num_kv_heads, head_dim = 23, 6, 2, 64
    angles = torch.arange(100)[:, None] * 0.01 ** torch.linspace(0, 1, rotary_dim // 2)
    cos_sin, positions = (
        torch.cat((angles.cos(), angles.sin()), -1),
        torch.randint(0, 100, (num_tokens,)),
    )
    slots = torch.randperm(48)[:num_tokens]
    slots[::5] = -1
    library.set_num_threads(2)
    results, calls = [], []
    for _ in range(2):
        torch.manual_seed(16)
        qkv = rand(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
        caches = torch.zeros(
            2, 6, 8, num_kv_heads, kv_cache_row(head_dim, cache_dtype), dtype=cache_dtype
        )
        results.append((qkv, caches))
    for qkv, caches in results:
        query, key, value = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        of_key = {"key_row": key.stride(0), "key_head": key.stride(1)}
        rotated = {"query_row": qkv.stride(0), "query_head": qkv.stride(1), **of_key}
        stored = {**of_key, "value_row": value.stride(0), "value_head": value.stride(1)}
        kind = CALL_DTYPES[dtype]
        calls.append(
            (
                Rotary(
                    op=Op.ROTARY,
                    dtype=kind,
                    rows=-1,
                    query=query.data_ptr(),
                    key=key.data_ptr(),
                    cos_sin=cos_sin.data_ptr(),
                    components=None,
                    **rotated,
                    heads=num_heads,
                    kv_heads=num_kv_heads,
                    rotary_dim=rotary_dim,
                ),
                WriteKv(
                    op=Op.WRITE_KV,
                    dtype=kind,
                    rows=-1,
                    key=key.data_ptr(),
                    value=value.data_ptr(),
                    key_cache=caches[0].data_ptr(),
                    value_cache=caches[1].data_ptr(),
                    **stored,
                    kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    block_size=8,
                    cache_block=caches[0].stride(0),
                    cache_dtype=CACHE_DTYPES[cache_dtype],
                    group=0,
                ),
            )
        )
    step = Step(
        num_tokens=num_tokens, positions=positions.data_ptr(), slot_mapping=slots.data_ptr()
    )
    for call in calls[0]:
        library.run(call, step)
    rotation, write = calls[1]
    op = {"op": Op.ROTARY_AND_WRITE_KV}
    library.run(RotaryAndWriteKv(**write.values() | rotation.values() | op), step)
    for apart, together in zip(*results):
        assert same_bits(apart, together)
    numbers = [parts(cache)[0] if cache_dtype == torch.int8 else cache for cache in results[0][1]]
    written = torch.stack(numbers).flatten(1, 2).ne(0).any(0).flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == sorted(slots[slots >= 0].tolist())
