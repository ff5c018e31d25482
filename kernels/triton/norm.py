"""Implements RMS norms and layer norms in Triton. A program holds whole rows, so that each is read
once.

Must not know: models, requests.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..registry import register
from .device import PLAIN, PRIORITY, TILE, dependent, is_cuda


@triton.jit
def _normalise(x, weight, eps, SIZE: tl.constexpr):
    """x [ROWS, BLOCK] f32 with zeros beyond SIZE, weight [BLOCK] -> [ROWS, BLOCK] f32, rounded to
    the weight's dtype before the product.
    """
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    normalised = (x * scale[:, None]).to(weight.dtype).to(tl.float32)
    return normalised * weight.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    heads,
    token_stride,
    head_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x: `heads` rows per token, with strides; out [num_rows, SIZE] contiguous."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    offset = (row // heads).to(tl.int64) * token_stride + (row % heads) * head_stride
    x = tl.load(x_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * SIZE + column[None, :],
        _normalise(x, weight, eps, SIZE).to(out_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=["num_rows"])
def fused_add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    residual_ptrs = residual_ptr + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    dtype = x_ptr.dtype.element_ty
    total = (x + residual).to(dtype)
    tl.store(residual_ptrs, total, mask=mask)
    normalised = _normalise(total.to(tl.float32), weight, eps, SIZE)
    tl.store(x_ptrs, normalised.to(dtype), mask=mask)


@triton.jit
def _centred(x, weight_ptr, bias_ptr, eps, SIZE: tl.constexpr, BIAS: tl.constexpr):
    """x [ROWS, BLOCK] f32 -> its layer norm [ROWS, BLOCK] f32."""
    column = tl.arange(0, x.shape[1])
    in_row = column < SIZE
    mean = tl.sum(tl.where(in_row[None, :], x, 0.0), axis=1) / SIZE
    centred = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    normalised = centred * scale[:, None] * weight[None, :]
    if BIAS:
        normalised += tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
    return normalised


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    heads,
    token_stride,
    head_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """As rms_norm_kernel. Without BIAS, bias_ptr is not read."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    offset = (row // heads).to(tl.int64) * token_stride + (row % heads) * head_stride
    x = tl.load(x_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * SIZE + column[None, :],
        _centred(x, weight_ptr, bias_ptr, eps, SIZE, BIAS).to(out_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=["num_rows"])
def fused_add_layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    residual_ptrs = residual_ptr + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    total = (x + residual).to(dtype)
    tl.store(residual_ptrs, total, mask=mask)
    normalised = _centred(total.to(tl.float32), weight_ptr, bias_ptr, eps, SIZE, BIAS)
    tl.store(x_ptrs, normalised.to(dtype), mask=mask)


def _shape(size: int) -> dict[str, int | bool]:
    """Returns the rows per program and the number of warps.

    Small rows (heads) share a program; a large row has 8 warps with up to four loads in flight
    each.
    """
    block = triton.next_power_of_2(size)
    return {
        "SIZE": size,
        "BLOCK": block,
        "ROWS": max(1, TILE // block),
        "num_warps": 8 if block > 2 * TILE else 4,
        **PLAIN,
    }


def _heads(x: Tensor) -> Tensor:
    """[..., size] -> [tokens, heads, size], where each token of x [T, size] is one head"""
    heads = x.unsqueeze(-2) if x.dim() < 3 else x.flatten(0, -3)
    return heads.reshape(-1, *heads.shape[-2:])


@register("rms_norm", name="triton", predicate=is_cuda, priority=PRIORITY)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = _heads(x)
    out = heads.new_empty(heads.shape)
    shape = _shape(x.shape[-1])
    num_rows = heads.shape[0] * heads.shape[1]
    grid = (triton.cdiv(num_rows, shape["ROWS"]),)
    strides = heads.stride(0), heads.stride(1)
    rms_norm_kernel[grid](
        heads, weight, out, num_rows, heads.shape[1], *strides, eps, **shape, **dependent()
    )
    return out.view(x.shape)


@register("fused_add_rms_norm", name="triton", predicate=is_cuda, priority=PRIORITY)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    shape = _shape(x.shape[-1])
    grid = (triton.cdiv(len(x), shape["ROWS"]),)
    fused_add_rms_norm_kernel[grid](
        x, residual, weight, len(x), x.stride(0), residual.stride(0), eps, **shape
    )


@register("layer_norm", name="triton", predicate=is_cuda, priority=PRIORITY)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    heads = _heads(x)
    out = heads.new_empty(heads.shape)
    shape = _shape(x.shape[-1])
    num_rows = heads.shape[0] * heads.shape[1]
    layer_norm_kernel[(triton.cdiv(num_rows, shape["ROWS"]),)](
        heads,
        weight,
        weight if bias is None else bias,
        out,
        num_rows,
        heads.shape[1],
        heads.stride(0),
        heads.stride(1),
        eps,
        **shape,
        BIAS=bias is not None,
    )
    return out.view(x.shape)


@register("fused_add_layer_norm", name="triton", predicate=is_cuda, priority=PRIORITY)
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    shape = _shape(x.shape[-1])
    fused_add_layer_norm_kernel[(triton.cdiv(len(x), shape["ROWS"]),)](
        x,
        residual,
        weight,
        weight if bias is None else bias,
        len(x),
        x.stride(0),
        residual.stride(0),
        eps,
        **shape,
        BIAS=bias is not None,
    )
