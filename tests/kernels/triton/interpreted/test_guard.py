"""The guard itself: each kind of fault is found, and bf16 is rounded as in torch."""

import pytest
import torch
import triton
import triton.language as tl
from quire.tests.kernels.triton import guard
from triton.runtime.errors import InterpreterError


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        out_ptr + i,
        tl.load(x_ptr + i + shift, mask=i < n).to(tl.float32).to(out_ptr.dtype.element_ty),
        mask=i < n,
    )


@triton.jit
def meet_kernel(x_ptr, WRITE: tl.constexpr, ATOMIC: tl.constexpr):
    """Every program works on the same element."""
    if ATOMIC:
        tl.atomic_add(x_ptr, 1)
    elif WRITE:
        tl.store(x_ptr, tl.program_id(0))
    else:
        tl.store(x_ptr + 1 + tl.program_id(0), tl.load(x_ptr))


@triton.jit
def last_sums_kernel(
    x_ptr, count_ptr, out_ptr, N: tl.constexpr, ORDER: tl.constexpr, EARLY: tl.constexpr
):
    """Each program stores an element; the last one sums them."""
    if EARLY == 0:
        tl.store(x_ptr + tl.program_id(0), 1.0)
    place = tl.atomic_add(count_ptr, 1, sem=ORDER)
    if EARLY:
        tl.store(x_ptr + tl.program_id(0), 1.0)
    if place == N - 1:
        tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N))))


@triton.jit
def add_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr) + tl.load(x_ptr + 1))


@triton.jit
def sum_kernel(x_ptr, out_ptr):
    tl.store(
        out_ptr,
        tl.sum(
            tl.load(x_ptr + tl.arange(0, 4))
            .to(tl.float32)
            .to(tl.bfloat16, bitcast=False)
            .reshape(2, 2),
            axis=1,
        ).max(0),
    )


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    tl.store(out_ptr + i * 16 + j, tl.dot(tl.load(a_ptr + i * 16 + j), tl.load(b_ptr + i * 16 + j)))


def test_rounding_is_torchs():
    x = torch.cat(
        (
            torch.randn(3000),
            torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3895e38, 1e-40]),
        )
    )
    # halfway
    x = torch.cat(
        (
            x,
            (x.to(torch.bfloat16).view(torch.int16).to(torch.int32) << 16 | 0x8000).view(
                torch.float32
            )[:3000],
        )
    )
    out = torch.empty(len(x), dtype=torch.bfloat16)
    copy_kernel[(1,)](x, out, len(x), 0, BLOCK=8192)
    assert torch.equal(out.nan_to_num(7), x.to(torch.bfloat16).nan_to_num(7))
    back = torch.empty(len(x))
    copy_kernel[(1,)](out, back, len(x), 0, BLOCK=8192)
    assert torch.equal(back.nan_to_num(7), out.float().nan_to_num(7))


def test_products_of_matrices():
    a, b = torch.randn(2, 16, 16).bfloat16()
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float())


@pytest.mark.parametrize("shift", [-1, 1])
def test_out_of_bounds(shift):
    with pytest.raises(InterpreterError, match="out of bounds: a load by program"):
        copy_kernel[(3,)](torch.zeros(10), torch.zeros(10), 10, shift, BLOCK=4)
    with pytest.raises(InterpreterError, match="out of bounds: a store by program"):
        copy_kernel[(3,)](torch.zeros(11), torch.zeros(9), 10, 0, BLOCK=4)
    copy_kernel[(3,)](torch.zeros(10), torch.zeros(10), 10, 0, BLOCK=4)


def test_races():
    for write, memory in ((True, torch.zeros(8)), (False, torch.zeros(2))):
        meet_kernel[(1,)](memory, WRITE=write, ATOMIC=False)
    with pytest.raises(InterpreterError, match="writes what another one writes"):
        meet_kernel[(2,)](torch.zeros(8), WRITE=True, ATOMIC=False)
    meet_kernel[(3,)](torch.zeros(8), WRITE=False, ATOMIC=False)  # all read one element: no race
    count = torch.zeros(1, dtype=torch.int32)
    meet_kernel[(5,)](count, WRITE=True, ATOMIC=True)
    assert count.item() == 5
    with guard.unordered():
        meet_kernel[(2,)](torch.zeros(8), WRITE=True, ATOMIC=False)
    with pytest.raises(InterpreterError, match="race"):
        copy_kernel[(2,)](shared := torch.zeros(9), shared, 8, 1, BLOCK=4)


def test_a_hand_over_is_no_race():
    x, count, out = torch.zeros(4), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    last_sums_kernel[(4,)](x, count, out, N=4, ORDER="acq_rel", EARLY=0)
    assert out.item() == 4
    for order, early in (("relaxed", 0), ("acq_rel", 1)):
        with pytest.raises(InterpreterError, match="reads what another one writes"):
            last_sums_kernel[(4,)](x, count.zero_(), out, N=4, ORDER=order, EARLY=early)


def test_one_store_to_an_address_twice():
    with pytest.raises(InterpreterError, match="twice at once"):
        scatter_kernel[(1,)](torch.tensor([3, 1, 3, 0]), torch.zeros(4))


@triton.jit
def scatter_kernel(index_ptr, out_ptr):
    i = tl.arange(0, 4)
    tl.store(out_ptr + tl.load(index_ptr + i), i)


def test_arithmetic_in_bf16_is_refused():
    x = torch.ones(4, dtype=torch.bfloat16)
    for kernel in (add_kernel, sum_kernel):
        with pytest.raises(InterpreterError, match="in bf16"):
            kernel[(1,)](x, torch.zeros(1, dtype=torch.bfloat16))


def test_memory_is_poisoned():
    assert (
        torch.empty(3).isnan().all()
        and torch.empty_like(torch.zeros(2, dtype=torch.bfloat16)).isnan().all()
    )
