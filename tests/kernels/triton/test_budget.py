"""The checks of compiled code: launches are seen, spills and narrow loads are found, waiting for
the device raises an error.
"""

import pytest
import torch
import triton
import triton.language as tl
from quire.tests.kernels.triton.budget import Budget, bf16, compile_launches, f32
from quire.tests.kernels.triton.waiting import NothingWaits


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i * stride, mask=i < n), mask=i < n)


@triton.jit
def dot_kernel(x_ptr, out_ptr, M: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + i * 64 + j)
    y = tl.load(x_ptr + tl.arange(0, 64)[:, None] * 64 + j)
    tl.store(out_ptr + i * 64 + j, tl.dot(x, y))


@triton.jit
def many_values_kernel(x_ptr, out_ptr):
    """Keeps 32 values per thread that are all used again at the end."""
    i = tl.arange(0, 1024)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, x + tl.cumsum(x, reverse=True))


def copy(n: int, stride: int, offset: int = 0) -> None:
    copy_kernel[4, 1](bf16(8192)[offset:], bf16(4096), n, stride, BLOCK=1024)


def test_launches_are_compiled_as_the_wrapper_asks():
    launches = compile_launches(lambda: [copy(4096, 1), copy(4096, 3)], 90)
    assert [launch.kernel for launch in launches] == ["copy_kernel"] * 2
    assert (
        "sm_90" in launches[0].sass
        and "sm_80" in compile_launches(lambda: copy(4096, 1), 80)[0].sass
    )


@pytest.mark.slow
def test_budgets_are_kept_or_not():
    Budget("wide", lambda: copy(4096, 1)).check(90)
    Budget("strided", lambda: copy(4096, 3), wide_loads=False).check(90)
    for call in (lambda: copy(4096, 3), lambda: copy(4096, 1, offset=1)):
        with pytest.raises(AssertionError, match="no 16-byte loads"):
            Budget("narrow", call).check(90)
    with pytest.raises(AssertionError, match="registers"):
        Budget("registers", lambda: copy(4096, 1), registers=4).check(90)
    with pytest.raises(AssertionError, match="copy_kernel"):
        Budget("launches", lambda: copy(4096, 1), launches=2).check(90)
    with pytest.raises(AssertionError, match="spills"):
        Budget(
            "spills",
            lambda: many_values_kernel[(1,)](f32(1024), f32(1024), num_warps=1, maxnreg=24),
        ).check(90)


def test_instructions_are_found():
    budget = Budget(
        "wgmma",
        lambda: dot_kernel[(1,)](bf16(64, 64), f32(64, 64), M=64),
        contains={80: (r"\bHMMA",), 90: (r"\bHGMMA",)},
    )
    budget.check(80), budget.check(90)
    with pytest.raises(AssertionError, match="HGMMA"):  # too few rows for it
        Budget(
            "mma",
            lambda: dot_kernel[(1,)](bf16(64, 64), f32(64, 64), M=16),
            contains={90: (r"\bHGMMA",)},
        ).check(90)


def test_waiting_for_the_gpu_is_refused():
    x = torch.ones(3)
    for wait in (
        lambda: x.sum().item(),
        lambda: bool(x[0] > 0),
        lambda: x.tolist(),
        lambda: x.nonzero(),
        lambda: int(x[0]),
    ):
        with pytest.raises(AssertionError, match="waits for the GPU"), NothingWaits():
            wait()
    with pytest.raises(AssertionError, match="waits for the GPU"):
        compile_launches(lambda: copy(int(x[0]), 1), 90)
