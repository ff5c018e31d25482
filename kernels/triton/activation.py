"""Implements gated activations, scaling and adding in Triton.

Must not know: models, requests.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PLAIN, PRIORITY, TILE, is_cuda


@triton.jit
def gate_kernel(
    x_ptr, out_ptr, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """x [T, 2 * SIZE] with strides, out [T, SIZE] contiguous. A program handles one block of one
    token's row.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate_ptrs = x_ptr + token * token_stride + column
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0)
    inner = gate
    if GELU:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate * tl.sigmoid(inner)).to(up.dtype)
    tl.store(
        out_ptr + token * SIZE + column,
        (active.to(tl.float32) * up.to(tl.float32)).to(up.dtype),
        mask=mask,
    )


@register("silu_and_mul", name="triton", predicate=is_cuda, priority=PRIORITY)
def silu_and_mul(x: Tensor) -> Tensor:
    return _gate(x, False)


@register("gelu_tanh_and_mul", name="triton", predicate=is_cuda, priority=PRIORITY)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _gate(x, True)


def _gate(x: Tensor, gelu: bool) -> Tensor:
    size = x.shape[1] // 2
    out = x.new_empty(len(x), size)
    block = min(TILE, triton.next_power_of_2(size))
    gate_kernel[len(x), triton.cdiv(size, block)](
        x, out, x.stride(0), SIZE=size, BLOCK=block, GELU=gelu, **PLAIN
    )
    return out


@triton.jit(do_not_specialize=["factor"])
def scale_kernel(x_ptr, factor, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, SIZE] with strides, in place."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    ptrs = x_ptr + tl.program_id(0).to(tl.int64) * token_stride + column
    x = tl.load(ptrs, mask=mask)
    tl.store(ptrs, (x.to(tl.float32) * factor).to(x.dtype), mask=mask)


@triton.jit
def add_kernel(
    x_ptr, residual_ptr, x_stride, residual_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """x and residual [T, SIZE] with strides; the residual in place."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    x = tl.load(x_ptr + token * x_stride + column, mask=mask)
    residual_ptrs = residual_ptr + token * residual_stride + column
    residual = tl.load(residual_ptrs, mask=mask)
    total = x.to(tl.float32) + residual.to(tl.float32)
    tl.store(residual_ptrs, total.to(residual.dtype), mask=mask)


def _grid(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Programs for each block of each row of x [T, H], and the sizes they are compiled for."""
    size = x.shape[1]
    block = min(TILE, triton.next_power_of_2(size))
    return (len(x), triton.cdiv(size, block)), {"SIZE": size, "BLOCK": block}


@register("scale", name="triton", predicate=is_cuda, priority=PRIORITY)
def scale(x: Tensor, factor: float) -> None:
    grid, sizes = _grid(x)
    scale_kernel[grid](x, factor, x.stride(0), **sizes, **PLAIN)


@register("add", name="triton", predicate=is_cuda, priority=PRIORITY)
def add(x: Tensor, residual: Tensor) -> None:
    grid, sizes = _grid(x)
    add_kernel[grid](x, residual, x.stride(0), residual.stride(0), **sizes, **PLAIN)
