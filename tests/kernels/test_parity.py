"""Every registered implementation of every operation, against torch in fp64 and against the
reference.
"""

import dataclasses
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.kernels import registry
from quire.kernels.ops import kv_cache_row
from quire.kernels.registry import Facts, Implementation
from quire.tests.kernels import cases
from quire.tests.kernels.attention_cases import attention_case, context_slots, make_metadata
from quire.tests.kernels.case import (
    GPU,
    INTERPRETED,
    Case,
    copies,
    on_gpu,
    rand,
    slow_if_interpreted,
)
from quire.tests.kernels.state_cases import STATE_OPS

DTYPES = (torch.float32, torch.bfloat16)
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def all_implementations(
    op: str, dtype: torch.dtype, kv_cache_dtype: torch.dtype | None = None
) -> list[Implementation]:
    """The implementations for CPUs, and those for a GPU if there is one.

    In Triton's interpreter (tests/kernels/triton/), which is slow: only the one that a GPU would
    run.
    """
    found, facts = [], {"dtype": dtype, "head_dim": 64, "kv_cache_dtype": kv_cache_dtype}
    if not INTERPRETED:
        found += [i for i in registry.implementations(op) if i.predicate(Facts("cpu", **facts))]
    has_fp8 = GPU.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    if INTERPRETED or (has_fp8 if kv_cache_dtype == FP8 else GPU.type == "cuda"):
        registry.import_implementations("cuda")
        for_gpu = [
            i
            for i in registry.implementations(op)
            if i.predicate(Facts("cuda", **facts)) and i.name != "reference"
        ]
        for_gpu = sorted(for_gpu, key=lambda i: i.priority)[-1:] if INTERPRETED else for_gpu
        found += [dataclasses.replace(i, function=on_gpu(i.function)) for i in for_gpu]
    return found


def label(value: object) -> str:
    return value.name if isinstance(value, Implementation) else str(value).removeprefix("torch.")


# in the interpreter these take seconds: fp32 there with `pytest -m slow`
LONG = {"add_lora", "fused_moe", "gated_delta_rule", "pack_quantized_linear", "selective_scan"}
LONG |= {"altup_correct", "altup_predict", "gaussian_top_k", "latent_attention", "match_magnitude"}
LONG |= {"rotary_embedding_by_component", "rotary_embedding_interleaved", "short_conv"}
LONG |= {"stack_streams"}
MODEL_OPS = [
    pytest.param(
        *(op, dtype, i),
        marks=pytest.mark.slow if INTERPRETED and op in LONG and dtype == torch.float32 else [],
    )
    for op in cases.MODEL_OPS
    for dtype in DTYPES
    for i in all_implementations(op, dtype)
]
STATE = [(op, i) for op in STATE_OPS for i in all_implementations(op, torch.float32)]
ATTENTION = [(dtype, i) for dtype in DTYPES for i in all_implementations("paged_attention", dtype)]


def error(results: tuple[torch.Tensor, ...], truth: tuple[torch.Tensor, ...]) -> float:
    """Root mean square of the difference over the elements that are defined in the expected result.

    A NaN where the expected result has none is an infinite error.
    """
    difference = torch.cat(
        [
            torch.where(t.isnan(), 0.0, r.double() - t).flatten()
            for r, t in zip(results, truth, strict=True)
        ]
    )
    return (
        0.0
        if not len(difference)
        else difference.square().mean().sqrt().nan_to_num(nan=float("inf")).item()
    )


def check_close(
    case: Case, implementation: Implementation, dtype: torch.dtype, rounding: float = 0.0
) -> None:
    """rounding: lower bound of torch's relative error.

    On few numbers torch's own error may be small by chance.
    """
    results, truth = case.run(implementation.function), case.truth(torch.float64)
    for result, expected in zip(results, truth, strict=True):
        assert result.shape == expected.shape and result.dtype == dtype, case.name
    size = error(truth, tuple(torch.zeros_like(t) for t in truth))
    if dtype == torch.float32:
        assert error(results, truth) < 1e-6 * max(1.0, size), case.name
    else:
        assert error(results, truth) <= 1.5 * max(
            error(case.truth(dtype), truth), rounding * size
        ), case.name


def test_every_operation_has_cases():
    others = {*cases.SAMPLING_OPS, *cases.ROUTING_OPS, *STATE_OPS}
    assert {*cases.MODEL_OPS, *others} == set(registry.CONTRACTS)


@pytest.mark.parametrize(("op", "dtype", "implementation"), MODEL_OPS, ids=label)
def test_agrees_with_torch_in_fp64(op, dtype, implementation):
    torch.manual_seed(0)
    for case in cases.MODEL_OPS[op](dtype):
        check_close(case, implementation, dtype)


@slow_if_interpreted  # the reference agrees with torch, too
@pytest.mark.parametrize(
    ("op", "dtype", "implementation"),
    [case for case in MODEL_OPS if case.values[2].name != "reference"],
    ids=label,
)
def test_agrees_with_the_reference(op, dtype, implementation):
    """In fp32 up to rounding; in bf16 up to two steps, since sums may have another order."""
    torch.manual_seed(1)
    reference = next(i for i in registry.implementations(op) if i.name == "reference")
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-7, 2**-7)
    for case in cases.MODEL_OPS[op](dtype):
        for result, expected in zip(
            case.run(implementation.function), case.run(reference.function), strict=True
        ):
            torch.testing.assert_close(
                result,
                expected,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda m, case=case: f"{case.name}: {m}",
            )


@pytest.mark.parametrize(("op", "implementation"), STATE, ids=label)
def test_tables_of_slots_are_bit_equal(op, implementation):
    """Memory that must not be written does not change either."""
    for case in STATE_OPS[op]():
        for result, expected in zip(
            case.run(implementation.function), case.torch_own(*case.args), strict=True
        ):
            assert result.dtype == expected.dtype and torch.equal(result, expected), case.name


@pytest.mark.parametrize(
    "implementation", all_implementations("rms_norm", torch.bfloat16), ids=label
)
def test_bf16_norm_rounds_before_the_weight_as_transformers_does(implementation):
    torch.manual_seed(2)
    x, weight = rand(40, 896, dtype=torch.bfloat16), rand(896, dtype=torch.bfloat16)
    normalised = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(implementation.function(x, weight, 1e-6), weight * normalised.to(x.dtype))


@st.composite
def batches(draw) -> tuple[list[int], list[int], tuple[int, int, int], int]:
    """Rows of (query tokens, context before them), decodes first; heads; block size."""
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from([1, 1, 1, 2, 3, 17, 40]), st.integers(0, 90)),
            min_size=1,
            max_size=8,
        )
    )
    rows.sort(key=lambda row: row[0] != 1)
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads = (num_kv_heads * group, num_kv_heads, draw(st.sampled_from([8, 16, 64])))
    return (
        [q for q, _ in rows],
        [q + context for q, context in rows],
        heads,
        draw(st.sampled_from([8, 16, 32])),
    )


@pytest.mark.parametrize(("dtype", "implementation"), ATTENTION, ids=label)
@settings(max_examples=3 if INTERPRETED else 25, deadline=None, derandomize=True)
@given(batch=batches())
def test_attention_over_ragged_batches(dtype, implementation, batch):
    torch.manual_seed(len(batch[0]))
    check_close(attention_case(*batch, dtype=dtype), implementation, dtype, rounding=2**-8)


@pytest.mark.parametrize(("dtype", "implementation"), ATTENTION, ids=label)
def test_a_request_with_nan_does_not_affect_others(dtype, implementation):
    torch.manual_seed(3)
    case = attention_case([1, 1, 1, 12, 20], [30, 31, 50, 12, 45], (4, 2, 16), 16, dtype)
    (before,) = case.run(implementation.function)
    query, key_cache, value_cache, metadata, scale = case.args
    for row, cache in ((1, key_cache), (3, value_cache)):
        cache[context_slots(metadata, row, 16)] = float("nan")
    after = implementation.function(query, key_cache, value_cache, metadata, scale)
    starts = metadata.query_start_loc.tolist()
    for row in range(5):
        rows = slice(starts[row], starts[row + 1])
        assert (
            after[rows].isnan().all() if row in (1, 3) else torch.equal(after[rows], before[rows])
        )


@pytest.mark.parametrize(("dtype", "implementation"), ATTENTION, ids=label)
def test_chunked_prefill_equals_whole(dtype, implementation):
    torch.manual_seed(4)
    sizes = (1, 15, 16, 17, 1, 40, 20) if INTERPRETED else (1, 15, 16, 17, 1, 300, 180)
    total, heads, block_size = sum(sizes), (4, 2, 32), 16
    query, key_cache, value_cache, whole, scale = attention_case(
        [total], [total], heads, block_size, dtype
    ).args
    expected = implementation.function(query, key_cache, value_cache, whole, scale)
    pieces, start = [], 0
    for size in sizes:
        end = start + size
        metadata = make_metadata([size], [end], block_size, 64)
        metadata.block_tables[:] = whole.block_tables[:, : metadata.block_tables.shape[1]]
        pieces.append(
            implementation.function(query[start:end], key_cache, value_cache, metadata, scale)
        )
        start = end
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "implementation"), ATTENTION, ids=label)
def test_layers_share_metadata(dtype, implementation):
    """Values kept in metadata.scratch must be valid for the next layer, whose cache has other
    contents in the same blocks.
    """
    torch.manual_seed(5)
    case = attention_case([1, 1, 9], [200, 20, 30], (4, 2, 16), 16, dtype)
    query, key_cache, value_cache, metadata, scale = case.args
    other = [
        torch.randn_like(query),
        *(torch.where(cache.isnan(), cache, cache.flip(-1)) for cache in (key_cache, value_cache)),
    ]
    expected = implementation.function(*other, *copies((metadata, scale)))
    implementation.function(query, key_cache, value_cache, metadata, scale)
    assert torch.equal(implementation.function(*other, metadata, scale), expected)


# ---------------------------------------------------------------- a cache in fp8


def with_cache(op: str, cache_dtype: torch.dtype) -> list:
    return [(dtype, i) for dtype in DTYPES for i in all_implementations(op, dtype, cache_dtype)]


def nearest_fp8(x: torch.Tensor) -> torch.Tensor:
    """x [...] -> the nearest fp8 number, ties to the one whose last bit is 0; values beyond the
    largest become the largest.
    """
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).double()  # ascending from 0
    distance = (x.double().abs().clamp(max=448)[..., None] - numbers).abs()
    distance[..., 1::2] *= 1 + 1e-12
    bits = distance.argmin(-1).to(torch.uint8) + torch.where(x.signbit(), 128, 0).to(torch.uint8)
    return torch.where(x.isnan(), 127, bits).view(FP8)


def fp8_cases(op: str, dtype: torch.dtype) -> list[Case]:
    """The operation's cases, with numbers of all magnitudes and caches in fp8."""
    special = torch.tensor(
        [
            0,
            2**-9,
            2**-10,
            3 * 2**-10,
            2**-11,
            448,
            449,
            463,
            464,
            1e9,
            torch.inf,
            torch.nan,
            17,
            18,
            19,
        ]
    )
    special = torch.cat((special, -special)).to(dtype)
    changed, kept = [], cases.MODEL_OPS[op](dtype)
    for case in kept[2:5] if INTERPRETED else kept:
        names = list(inspect.signature(registry.CONTRACTS[op]).parameters)
        args = list(copies(case.args))
        for name in ("key", "value"):
            x = args[names.index(name)]
            x *= torch.exp2(torch.randint(-12, 12, x.shape)).to(dtype)
            if op == "reshape_and_cache" and x.numel():
                x[..., 0] = special[torch.randint(len(special), x.shape[:-1])]
        for name in ("key_cache", "value_cache"):
            args[names.index(name)] = nearest_fp8(args[names.index(name)])
        changed.append(Case(case.name, tuple(args), case.torch_own, case.in_place))
    return changed


def same_fp8(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(torch.where(x.isnan(), 1000.0, x.float()) for x in (a, b)))


@pytest.mark.parametrize(
    ("dtype", "implementation"), with_cache("reshape_and_cache", FP8), ids=label
)
def test_numbers_are_rounded_to_the_nearest_of_fp8(dtype, implementation):
    torch.manual_seed(6)
    for case in fp8_cases("reshape_and_cache", dtype):
        key, value, *caches, slots = case.args
        expected = case.torch_own(
            nearest_fp8(key).float(),
            nearest_fp8(value).float(),
            *(cache.float() for cache in caches),
            slots,
        )
        for result, cache in zip(case.run(implementation.function), expected, strict=True):
            assert result.dtype == FP8 and same_fp8(result, cache), case.name


@pytest.mark.parametrize(
    ("dtype", "implementation"), with_cache("fused_qk_rope_reshape_and_cache", FP8), ids=label
)
def test_rotated_keys_are_rounded_once_more(dtype, implementation):
    """The stored values are those that the operation stores in a plain cache, rounded."""
    torch.manual_seed(7)
    for case in fp8_cases("fused_qk_rope_reshape_and_cache", dtype):
        plain = Case(
            case.name,
            tuple(
                arg.to(dtype) if getattr(arg, "dtype", None) == FP8 else arg for arg in case.args
            ),
            case.torch_own,
            case.in_place,
        )
        query, *caches = case.run(implementation.function)
        expected_query, *expected = plain.run(implementation.function)
        # a norm's sum may have another order in a kernel for another cache: last bits in fp32
        torch.testing.assert_close(query, expected_query, rtol=5e-7, atol=1e-6)
        for cache, expected_cache in zip(caches, expected, strict=True):
            assert cache.dtype == FP8 and same_fp8(cache, nearest_fp8(expected_cache)), case.name


@pytest.mark.parametrize(("dtype", "implementation"), with_cache("paged_attention", FP8), ids=label)
def test_attention_over_fp8_equals_attention_over_its_numbers(dtype, implementation):
    """Also compares with the cache that was not rounded: the error is that of 4 bits, some percent
    of the summed values.
    """
    torch.manual_seed(8)
    case = attention_case([1, 1, 12], [200, 3, 70], (4, 2, 64), 16, dtype, 50)
    query, *caches = case.args[:3]
    rounded = [nearest_fp8(cache) for cache in caches]
    (result,) = Case(case.name, (query, *rounded, *case.args[3:]), case.torch_own).run(
        implementation.function
    )
    same = Case(
        case.name, (query, *(cache.to(dtype) for cache in rounded), *case.args[3:]), case.torch_own
    )
    (truth,), (unrounded,) = same.truth(torch.float64), case.truth(torch.float64)
    allowed = 1e-6 if dtype == torch.float32 else 1.5 * error(same.truth(dtype), (truth,))
    assert result.dtype == dtype and error((result,), (truth,)) <= allowed
    assert 2**-7 < error((result,), (unrounded,)) / unrounded.square().mean().sqrt() < 2**-4


@pytest.mark.parametrize(
    ("cache_dtype", "implementation"),
    [(d, i) for d in (FP8, INT8) for _, i in with_cache("copy_blocks", d)[:2]],
    ids=label,
)
def test_blocks_of_bytes_are_copied_byte_by_byte(cache_dtype, implementation):
    torch.manual_seed(9)
    source, destination = (
        torch.randint(256, (5, 8, 2, kv_cache_row(16, cache_dtype)), dtype=torch.uint8)
        for _ in range(2)
    )
    expected = destination.clone()
    expected[[0, 3]] = source[[4, 1]]
    implementation.function(
        [source.view(cache_dtype)], [destination.view(cache_dtype)], torch.tensor([[4, 0], [1, 3]])
    )
    assert torch.equal(destination, expected)


# ---------------------------------------------------------------- a cache in int8


def turning(head_dim: int) -> torch.Tensor:
    """[head_dim, head_dim] fp64: Sylvester's Hadamard matrix in blocks of the largest power of two
    that divides head_dim.
    """
    block, base = (
        torch.ones(1, 1, dtype=torch.float64),
        torch.tensor([[1, 1], [1, -1]], dtype=torch.float64),
    )
    while head_dim % (2 * len(block)) == 0:
        block = torch.kron(block, base)
    return torch.block_diag(*[block] * (head_dim // len(block)))


def unpack(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 cache -> integers [num_blocks, block_size, NKV, D] and scales [num_blocks,
    block_size, NKV, 1], fp64.
    """
    (num_blocks, block_size, heads, row), blocks = cache.shape, cache.flatten(1)
    count = block_size * heads * (row - 4)
    scales = (
        blocks[:, count:]
        .contiguous()
        .view(torch.float32)
        .view(num_blocks, heads, block_size, 1)
        .transpose(1, 2)
    )
    return blocks[:, :count].reshape(
        num_blocks, block_size, heads, row - 4
    ).double(), scales.double()


@pytest.mark.sampled
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128, 256, 512])
@pytest.mark.parametrize(
    ("dtype", "implementation"), with_cache("reshape_and_cache", INT8), ids=label
)
def test_int8_heads_are_rounded_to_nearest(dtype, implementation, head_dim):
    torch.manual_seed(10)
    heads = torch.randn(2, 30, 3, head_dim) * torch.exp2(
        torch.randint(-40, 40, (2, 30, 3, 1)).float()
    )
    heads[0, :, :, 5] *= 100  # a channel that is much larger than the others, as in real keys
    heads[:, 7], heads[:, 8, 1], heads[:, 9] = 0, 1e-38, torch.eye(3, head_dim)
    key, value = heads = heads.to(dtype)
    caches = torch.full((2, 5, 8, 3, kv_cache_row(head_dim, INT8)), 77, dtype=INT8)
    untouched = unpack(caches[0])[1][0, 0, 0]
    slots = torch.randperm(40)[:30]
    slots[4] = -1
    implementation.function(key, value, *caches, slots)
    kept = slots >= 0
    for x, cache in zip((key.double() @ turning(head_dim), value.double()), caches):
        numbers, scales = (part.flatten(0, 1) for part in unpack(cache))
        others = [slot for slot in range(40) if slot not in slots]
        assert (numbers[others] == 77).all() and (scales[others] == untouched).all()
        x, numbers, scales = x[kept], numbers[slots[kept]], scales[slots[kept]]
        largest = x.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(
            scales, torch.where(largest > 1e-30, largest / 127, 0.0), rtol=1e-6, atol=0
        )
        assert (
            (numbers * scales - x).abs() <= 0.5001 * scales + 1e-30
        ).all() and numbers.abs().max() == 127
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(dtype)
    key[:3, 1, 2] = value[:3, 1, 2] = bad
    implementation.function(key, value, *caches, slots)
    for cache in caches:
        scales = unpack(cache)[1].flatten(0, 1)[slots[:4]]
        assert (
            scales[:3, 1].isnan().all()
            and scales[3].isfinite().all()
            and scales[:3, [0, 2]].isfinite().all()
        )


@pytest.mark.parametrize(
    ("dtype", "implementation"), with_cache("reshape_and_cache", INT8), ids=label
)
def test_int8_heads_have_the_references_bytes(dtype, implementation):
    """So blocks can move between engines, whatever device they compute on."""
    store = next(
        i.function for i in registry.implementations("reshape_and_cache") if i.name == "reference"
    )
    torch.manual_seed(12)
    for head_dim in (48, 128):
        key, value = torch.randn(2, 30, 3, head_dim).to(dtype)
        slots = torch.randperm(40)[:30]
        caches = torch.full((2, 2, 5, 8, 3, kv_cache_row(head_dim, INT8)), 77, dtype=INT8)
        store(key, value, *caches[0], slots)
        implementation.function(key, value, *caches[1], slots)
        assert torch.equal(*caches)


@pytest.mark.parametrize(
    ("dtype", "implementation"), with_cache("fused_qk_rope_reshape_and_cache", INT8), ids=label
)
def test_a_fused_store_into_int8_is_that_of_its_operations(dtype, implementation):
    torch.manual_seed(13)
    query, key, value = (torch.randn(9, heads, 32).to(dtype) for heads in (4, 2, 2))
    weight, angles = torch.rand(32).to(dtype), torch.randn(20, 16)
    caches = torch.full((2, 4, 4, 2, 36), 77, dtype=INT8)
    positions, slots = torch.randperm(20)[:9], torch.randperm(16)[:9]
    given = (positions, query.clone(), key.clone(), value, angles, *caches, slots)
    implementation.function(*given, weight, weight, 1e-6)
    op = "fused_qk_rope_reshape_and_cache"
    reference = next(i.function for i in registry.implementations(op) if i.name == "reference")
    others = torch.full_like(caches, 77)
    given = (positions, query, key.clone(), value, angles, *others, slots)
    reference(*given, weight, weight, 1e-6)
    for cache, other in zip(caches, others):
        (numbers, scales), (other_numbers, other_scales) = unpack(cache), unpack(other)
        torch.testing.assert_close(scales, other_scales, rtol=2**-7, atol=0)
        # an element of a norm in bf16 may round to its neighbour
        assert (numbers - other_numbers).abs().max() <= (1 if dtype == torch.float32 else 8)


@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize(
    ("dtype", "implementation"), with_cache("paged_attention", INT8), ids=label
)
def test_attention_over_int8_equals_attention_over_its_numbers(dtype, implementation, head_dim):
    """Also compares with the cache that was not rounded: the error is that of 8 bits, even if one
    channel of all keys is thirty times the others.
    """
    torch.manual_seed(11)
    case = attention_case([1, 1, 12], [200, 3, 70], (4, 2, head_dim), 16, dtype, 50, 3.0)
    query, *plain = case.args[:3]
    plain[0][..., 5] *= 30
    query[..., 5] /= 30
    store = next(
        i.function for i in registry.implementations("reshape_and_cache") if i.name == "reference"
    )
    caches = torch.empty(2, *plain[0].shape[:3], kv_cache_row(head_dim, INT8), dtype=INT8)
    store(
        *(cache.flatten(0, 1) for cache in plain),
        *caches,
        torch.arange(plain[0].shape[0] * plain[0].shape[1]),
    )
    (result,) = Case(case.name, (query, *caches, *case.args[3:]), case.torch_own).run(
        implementation.function
    )
    (keys, key_scales), (values, value_scales) = map(unpack, caches)
    matrix = turning(head_dim)
    keys = keys * key_scales @ matrix / (matrix[0] != 0).sum()
    (truth,) = case.torch_own(query.double(), keys, values * value_scales, *case.args[3:])
    (unrounded,) = case.truth(torch.float64)
    size = truth.square().mean().sqrt()
    assert (
        result.dtype == dtype
        and error((result,), (truth,)) < (1e-6 if dtype == torch.float32 else 2**-7) * size
    )
    assert 2**-9 < error((result,), (unrounded,)) / size < 2**-5
