"""Every registered implementation of every operation against torch in fp64, and against the reference.
May know: the registry, the cases.
Must not know: which implementations there are: it enumerates them, a user's too."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.kernels import registry
from quire.kernels.registry import Facts, Implementation
from quire.tests.kernels import cases
from quire.tests.kernels.state_cases import STATE_OPS

DTYPES = (torch.float32, torch.bfloat16)


def all_implementations(op: str, dtype: torch.dtype) -> list[Implementation]:
    """Those for CPUs, and where there is a GPU those for it. In Triton's interpreter (tests/kernels/triton/), which is slow, the one that a
    GPU would run."""
    found = []
    if not cases.INTERPRETED:
        found += [i for i in registry.implementations(op) if i.predicate(Facts("cpu", dtype, head_dim=64))]
    if cases.INTERPRETED or cases.GPU.type == "cuda":
        registry.import_implementations("cuda")
        on_gpu = [i for i in registry.implementations(op) if i.predicate(Facts("cuda", dtype, head_dim=64)) and i.name != "reference"]
        on_gpu = sorted(on_gpu, key=lambda i: i.priority)[-1:] if cases.INTERPRETED else on_gpu
        found += [dataclasses.replace(i, function=cases.on_gpu(i.function)) for i in on_gpu]
    return found


def label(value: object) -> str:
    return value.name if isinstance(value, Implementation) else str(value).removeprefix("torch.")


MODEL_OPS = [(op, dtype, i) for op in cases.MODEL_OPS for dtype in DTYPES for i in all_implementations(op, dtype)]
STATE = [(op, i) for op in STATE_OPS for i in all_implementations(op, torch.float32)]
ATTENTION = [(dtype, i) for dtype in DTYPES for i in all_implementations("paged_attention", dtype)]


def error(results: tuple[torch.Tensor, ...], truth: tuple[torch.Tensor, ...]) -> float:
    """Root mean square of the difference, over the elements that the truth defines. A NaN where the truth has none is an infinite error."""
    difference = torch.cat([torch.where(t.isnan(), 0.0, r.double() - t).flatten() for r, t in zip(results, truth, strict=True)])
    return 0.0 if not len(difference) else difference.square().mean().sqrt().nan_to_num(nan=float("inf")).item()


def check_close(case: cases.Case, implementation: Implementation, dtype: torch.dtype, rounding: float = 0.0) -> None:
    """`rounding`: the least relative error that torch is taken to have. On a few numbers its own may be small by luck."""
    results, truth = case.run(implementation.function), case.truth(torch.float64)
    for result, expected in zip(results, truth, strict=True):
        assert result.shape == expected.shape and result.dtype == dtype, case.name
    if dtype == torch.float32:
        assert error(results, truth) < 1e-6, case.name
    else:
        size = error(truth, tuple(torch.zeros_like(t) for t in truth))
        assert error(results, truth) <= 1.5 * max(error(case.truth(dtype), truth), rounding * size), case.name


def test_every_operation_has_cases():
    assert {*cases.MODEL_OPS, *cases.SAMPLING_OPS, *STATE_OPS} == set(registry.CONTRACTS)


@pytest.mark.parametrize(("op", "dtype", "implementation"), MODEL_OPS, ids=label)
def test_agrees_with_torch_in_fp64(op, dtype, implementation):
    torch.manual_seed(0)
    for case in cases.MODEL_OPS[op](dtype):
        check_close(case, implementation, dtype)


@pytest.mark.parametrize(("op", "dtype", "implementation"), [m for m in MODEL_OPS if m[2].name != "reference"], ids=label)
def test_agrees_with_the_reference(op, dtype, implementation):
    """In fp32 to rounding; in bf16 to two of its steps, since sums may be taken in another order."""
    torch.manual_seed(1)
    reference = next(i for i in registry.implementations(op) if i.name == "reference")
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-7, 2**-7)
    for case in cases.MODEL_OPS[op](dtype):
        for result, expected in zip(case.run(implementation.function), case.run(reference.function), strict=True):
            torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, case=case: f"{case.name}: {m}")


@pytest.mark.parametrize(("op", "implementation"), STATE, ids=label)
def test_tables_of_slots_to_the_bit(op, implementation):
    """What is not to be written stays as it is, too."""
    for case in STATE_OPS[op]():
        for result, expected in zip(case.run(implementation.function), case.torch_own(*case.args), strict=True):
            assert result.dtype == expected.dtype and torch.equal(result, expected), case.name


@pytest.mark.parametrize("implementation", all_implementations("rms_norm", torch.bfloat16), ids=label)
def test_bf16_norm_rounds_before_the_weight_as_transformers_does(implementation):
    torch.manual_seed(2)
    x, weight = cases.rand(40, 896, dtype=torch.bfloat16), cases.rand(896, dtype=torch.bfloat16)
    normalised = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(implementation.function(x, weight, 1e-6), weight * normalised.to(x.dtype))


@st.composite
def batches(draw) -> tuple[list[int], list[int], tuple[int, int, int], int]:
    """Rows of (query tokens, context before them), decodes first; heads; block size."""
    rows = draw(st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 3, 17, 40]), st.integers(0, 90)), min_size=1, max_size=8))
    rows.sort(key=lambda row: row[0] != 1)
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads = (num_kv_heads * group, num_kv_heads, draw(st.sampled_from([8, 16, 64])))
    return [q for q, _ in rows], [q + context for q, context in rows], heads, draw(st.sampled_from([8, 16, 32]))


@pytest.mark.parametrize(("dtype", "implementation"), ATTENTION, ids=label)
@settings(max_examples=3 if cases.INTERPRETED else 25, deadline=None, derandomize=True)
@given(batch=batches())
def test_attention_over_ragged_batches(dtype, implementation, batch):
    torch.manual_seed(len(batch[0]))
    check_close(cases.attention_case(*batch, dtype=dtype), implementation, dtype, rounding=2**-8)


@pytest.mark.parametrize(("dtype", "implementation"), ATTENTION, ids=label)
def test_a_request_with_nan_spoils_only_itself(dtype, implementation):
    torch.manual_seed(3)
    case = cases.attention_case([1, 1, 1, 12, 20], [30, 31, 50, 12, 45], (4, 2, 16), 16, dtype)
    (before,) = case.run(implementation.function)
    query, key_cache, value_cache, metadata, scale = case.args
    for row, cache in ((1, key_cache), (3, value_cache)):
        cache[cases.context_slots(metadata, row, 16)] = float("nan")
    after = implementation.function(query, key_cache, value_cache, metadata, scale)
    starts = metadata.query_start_loc.tolist()
    for row in range(5):
        rows = slice(starts[row], starts[row + 1])
        assert after[rows].isnan().all() if row in (1, 3) else torch.equal(after[rows], before[rows])


@pytest.mark.parametrize(("dtype", "implementation"), ATTENTION, ids=label)
def test_chunked_prefill_equals_whole(dtype, implementation):
    torch.manual_seed(4)
    sizes = (1, 15, 16, 17, 1, 40, 20) if cases.INTERPRETED else (1, 15, 16, 17, 1, 300, 180)
    total, heads, block_size = sum(sizes), (4, 2, 32), 16
    query, key_cache, value_cache, whole, scale = cases.attention_case([total], [total], heads, block_size, dtype).args
    expected = implementation.function(query, key_cache, value_cache, whole, scale)
    pieces, start = [], 0
    for size in sizes:
        end = start + size
        metadata = cases.make_metadata([size], [end], block_size, 64)
        metadata.block_tables[:] = whole.block_tables[:, : metadata.block_tables.shape[1]]
        pieces.append(implementation.function(query[start:end], key_cache, value_cache, metadata, scale))
        start = end
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "implementation"), ATTENTION, ids=label)
def test_layers_share_metadata(dtype, implementation):
    """What is kept in metadata.scratch for the next layer must hold for it: other cache contents, the same pages."""
    torch.manual_seed(5)
    case = cases.attention_case([1, 1, 9], [200, 20, 30], (4, 2, 16), 16, dtype)
    query, key_cache, value_cache, metadata, scale = case.args
    other = [torch.randn_like(query), *(torch.where(cache.isnan(), cache, cache.flip(-1)) for cache in (key_cache, value_cache))]
    expected = implementation.function(*other, *cases.copies((metadata, scale)))
    implementation.function(query, key_cache, value_cache, metadata, scale)
    assert torch.equal(implementation.function(*other, metadata, scale), expected)
