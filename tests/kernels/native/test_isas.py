"""Every native kernel on every instruction set, emulated if the processor lacks it: correct, and
the same bits whatever rows are computed together.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quire.kernels import registry
from quire.kernels.cpu.native.library import library
from quire.kernels.ops import kv_cache_row
from quire.kernels.reference.kv_cache import parts
from quire.tests.kernels import cases
from quire.tests.kernels.attention_cases import attention_case, reference_attention
from quire.tests.kernels.case import Case, copies
from quire.tests.kernels.native.conftest import redirect_to
from quire.tests.kernels.test_parity import DTYPES, check_close, label
from torch import Tensor

NATIVE = [
    (op, dtype)
    for op in cases.MODEL_OPS
    for dtype in DTYPES
    if any(i.name == "native" for i in registry.implementations(op))
]
WORD = {torch.bfloat16: torch.int16, torch.float32: torch.int32}

# Operation -> its arguments that have a row per token. In all other operations a row is a request;
# attention has tests of its own.
PER_TOKEN = {
    "rms_norm": (0,),
    "fused_add_rms_norm": (0, 1),
    "silu_and_mul": (0,),
    "gelu_tanh_and_mul": (0,),
    "scale": (0,),
    "add": (0, 1),
    "add_gated": (0, 1, 2),
    "fused_moe": (0, 1, 2),
    "rotary_embedding": (0, 1, 2),
    "embedding": (0,),
    "pack_quantized_linear": (0,),
    "pack_gguf_linear": (0,),
    "layer_norm": (0,),
    "fused_add_layer_norm": (0, 1),
    **dict.fromkeys(("gelu", "gelu_tanh", "silu", "relu", "relu_squared", "gelu_and_mul"), (0,)),
    **dict.fromkeys(("gated_rms_norm", "multiply"), (0, 1)),
    **dict.fromkeys(("stack_streams", "match_magnitude", "altup_predict"), (0, 1)),
    "altup_correct": (0, 1, 2),
    "gaussian_top_k": (0,),
    "clamp": (0,),
}
BY_ROWS = [(op, dtype) for op, dtype in NATIVE if op in PER_TOKEN]


def native(op: str) -> registry.Implementation:
    return next(i for i in registry.implementations(op) if i.name == "native")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(x.contiguous().view(WORD.get(x.dtype, x.dtype)) for x in (a, b)))


def only(case: Case, rows: slice, op: str) -> Case:
    args = tuple(arg[rows] if i in PER_TOKEN[op] else arg for i, arg in enumerate(case.args))
    return replace(case, args=args)


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize(("op", "dtype"), NATIVE, ids=label)
def test_agrees_with_torch_in_fp64(isa, op, dtype):
    torch.manual_seed(0)
    for case in cases.MODEL_OPS[op](dtype):
        check_close(case, native(op), dtype)


@pytest.mark.sampled
@pytest.mark.parametrize(("op", "dtype"), BY_ROWS, ids=label)
def test_a_row_is_the_same_bits_alone_and_among_any_number(isa, op, dtype):
    torch.manual_seed(6)
    for case in cases.MODEL_OPS[op](dtype):
        num_rows = len(case.args[0])
        library.set_num_threads(1)
        whole = case.run(native(op).function)
        library.set_num_threads(3)
        for start, end in [
            (0, num_rows),
            (0, num_rows // 2),
            (num_rows // 2, num_rows),
            *((i, i + 1) for i in range(0, num_rows, 5)),
        ]:
            part = only(case, slice(start, end), op).run(native(op).function)
            for result, expected in zip(part, whole, strict=True):
                assert same_bits(result, expected[start:end]), f"{case.name}, rows {start} to {end}"


@pytest.mark.sampled
@pytest.mark.parametrize(("op", "dtype"), BY_ROWS, ids=label)
def test_rows_of_nan_and_of_infinity_do_not_affect_others(isa, op, dtype):
    torch.manual_seed(7)
    for case in cases.MODEL_OPS[op](dtype):
        if len(case.args[0]) < 4:
            continue
        spoilt = replace(case, args=tuple(copies(case.args)))
        for i in PER_TOKEN[op]:
            if spoilt.args[i].is_floating_point():
                spoilt.args[i][1], spoilt.args[i][2] = float("nan"), float("inf")
        kept = [row for row in range(len(case.args[0])) if row not in (1, 2)]
        for result, expected in zip(
            spoilt.run(native(op).function), case.run(native(op).function), strict=True
        ):
            assert same_bits(result[kept], expected[kept]), case.name


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_in_int8_has_the_references_bytes_and_its_attention(isa, dtype):
    torch.manual_seed(9)
    reference = {
        op: next(i.function for i in registry.implementations(op) if i.name == "reference")
        for op in ("reshape_and_cache", "paged_attention")
    }
    for head_dim in (16, 48, 64, 256):
        query, *plain, metadata, scale = attention_case(
            [1, 1, 9], [150, 3, 70], (4, 2, head_dim), 16, dtype
        ).args
        # of all slots; NaN in those without an owner
        heads = [cache.flatten(0, 1) for cache in plain]
        slots = torch.randperm(len(heads[0]))
        slots[torch.rand(len(slots)) < 0.1] = -1
        for cache_slots in (slots, torch.arange(len(slots))):
            caches = torch.zeros(
                2, 2, *plain[0].shape[:3], kv_cache_row(head_dim, torch.int8), dtype=torch.int8
            )
            reference["reshape_and_cache"](*heads, *caches[0], cache_slots)
            native("reshape_and_cache").function(*heads, *caches[1], cache_slots)
            for expected, cache in zip(*caches):
                (expected_numbers, expected_scales), (numbers, scales) = (
                    parts(expected),
                    parts(cache),
                )
                torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
                counts = scales.transpose(1, 2).isfinite().unsqueeze(-1)
                assert torch.equal(numbers * counts, expected_numbers * counts)
        (expected,) = Case("", (query, *caches[0], metadata, scale), reference_attention).run(
            reference["paged_attention"]
        )
        result = native("paged_attention").function(query, *caches[1], metadata, scale)
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(
    library is None or library.isas == ("avx2",),
    reason="the processor has nothing that is emulated elsewhere",
)
@pytest.mark.parametrize(("op", "dtype"), NATIVE, ids=label)
def test_the_emulation_equals_the_processor(emulated_library, op, dtype):
    """The emulation equals the processor, so tests elsewhere can rely on it."""
    torch.manual_seed(8)
    for isa in library.isas[:-1]:  # AVX2 is not emulated
        for case in cases.MODEL_OPS[op](dtype):
            library.use_isa(isa)
            expected = case.run(native(op).function)
            emulated_library().use_isa(isa)
            with redirect_to(library, emulated_library()):
                results = case.run(native(op).function)
            for result, real in zip(results, expected, strict=True):
                assert same_bits(result, real), f"{case.name} on {isa}"
    library.use_isa(library.isas[0])
