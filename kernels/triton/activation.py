"""Implements activations, gated or not, scaling, clamping and adding in Triton.

Must not know: models, requests.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PLAIN, PRIORITY, TILE, is_cuda


@triton.jit
def activated(x, KIND: tl.constexpr):
    """x f32 -> the activation KIND of it, f32."""
    if KIND == "gelu":
        result = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "silu":
        result = x * tl.sigmoid(x)
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu_squared")
        result = tl.where(x <= 0.0, 0.0, x)  # NaN stays
        if KIND == "relu_squared":
            result = result * result
    return result


@triton.jit
def activation_kernel(
    x_ptr, out_ptr, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    """x [T, SIZE] with strides, out [T, SIZE] contiguous. A program handles one block of one
    token's row.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    x = tl.load(x_ptr + token * token_stride + column, mask=mask, other=0.0)
    result = activated(x.to(tl.float32), KIND).to(x.dtype)
    tl.store(out_ptr + token * SIZE + column, result, mask=mask)


@triton.jit
def gate_kernel(
    x_ptr, out_ptr, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
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
    active = activated(gate, KIND).to(up.dtype)
    tl.store(
        out_ptr + token * SIZE + column,
        (active.to(tl.float32) * up.to(tl.float32)).to(up.dtype),
        mask=mask,
    )


@register("silu_and_mul", name="triton", predicate=is_cuda, priority=PRIORITY)
def silu_and_mul(x: Tensor) -> Tensor:
    return _gate(x, "silu")


@register("gelu_tanh_and_mul", name="triton", predicate=is_cuda, priority=PRIORITY)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _gate(x, "gelu_tanh")


@register("gelu_and_mul", name="triton", predicate=is_cuda, priority=PRIORITY)
def gelu_and_mul(x: Tensor) -> Tensor:
    return _gate(x, "gelu")


def _gate(x: Tensor, kind: str) -> Tensor:
    size = x.shape[1] // 2
    out = x.new_empty(len(x), size)
    block = min(TILE, triton.next_power_of_2(size))
    gate_kernel[len(x), triton.cdiv(size, block)](
        x, out, x.stride(0), SIZE=size, BLOCK=block, KIND=kind, **PLAIN
    )
    return out


@register("gelu", name="triton", predicate=is_cuda, priority=PRIORITY)
def gelu(x: Tensor) -> Tensor:
    return _activate(x, "gelu")


@register("gelu_tanh", name="triton", predicate=is_cuda, priority=PRIORITY)
def gelu_tanh(x: Tensor) -> Tensor:
    return _activate(x, "gelu_tanh")


@register("silu", name="triton", predicate=is_cuda, priority=PRIORITY)
def silu(x: Tensor) -> Tensor:
    return _activate(x, "silu")


@register("relu", name="triton", predicate=is_cuda, priority=PRIORITY)
def relu(x: Tensor) -> Tensor:
    return _activate(x, "relu")


@register("relu_squared", name="triton", predicate=is_cuda, priority=PRIORITY)
def relu_squared(x: Tensor) -> Tensor:
    return _activate(x, "relu_squared")


def _activate(x: Tensor, kind: str) -> Tensor:
    out = x.new_empty(x.shape)
    grid, sizes = _grid(x)
    activation_kernel[grid](x, out, x.stride(0), **sizes, KIND=kind, **PLAIN)
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


@triton.jit
def clamp_kernel(x_ptr, bounds_ptr, out_ptr, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, SIZE] with strides, out [T, SIZE] contiguous."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * token_stride + column, mask=mask, other=0.0).to(tl.float32)
    low = tl.load(bounds_ptr).to(dtype).to(tl.float32)
    high = tl.load(bounds_ptr + 1).to(dtype).to(tl.float32)
    x = tl.where(x < low, low, x)  # a NaN stays one
    tl.store(out_ptr + token * SIZE + column, tl.where(x > high, high, x).to(dtype), mask=mask)


@register("clamp", name="triton", predicate=is_cuda, priority=PRIORITY)
def clamp(x: Tensor, bounds: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    grid, sizes = _grid(x)
    clamp_kernel[grid](x, bounds, out, x.stride(0), **sizes, **PLAIN)
    return out


@register("scale", name="triton", predicate=is_cuda, priority=PRIORITY)
def scale(x: Tensor, factor: float) -> None:
    grid, sizes = _grid(x)
    scale_kernel[grid](x, factor, x.stride(0), **sizes, **PLAIN)


@register("add", name="triton", predicate=is_cuda, priority=PRIORITY)
def add(x: Tensor, residual: Tensor) -> None:
    grid, sizes = _grid(x)
    add_kernel[grid](x, residual, x.stride(0), residual.stride(0), **sizes, **PLAIN)
