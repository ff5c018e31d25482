"""Gathers rows of tables in Triton: the embedding's, those of the tokens whose logits are needed,
and those of images.

Must not know: models, requests.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, TILE, is_cuda


@triton.jit(do_not_specialize=["num_rows"])
def gather_rows_kernel(
    x_ptr, indices_ptr, out_ptr, num_rows, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """x [num_rows, SIZE] with strides; out contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    index = tl.load(indices_ptr + row).to(tl.int64)
    index = tl.where(index < num_rows, index, 0)  # as first_if_absent asks
    tl.store(
        out_ptr + row * SIZE + column,
        tl.load(x_ptr + index * row_stride + column, mask=mask),
        mask=mask,
    )


@triton.jit
def combine_rows_kernel(
    x_ptr,
    rows_ptr,
    table_ptr,
    x_stride,
    table_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """A row of x becomes the row of the table that belongs to it, if any, or gets it added."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + token).to(tl.int64)
    mask = (column < SIZE) & (row >= 0)
    values = tl.load(table_ptr + row * table_stride + column, mask=mask, other=0.0)
    x_ptrs = x_ptr + token * x_stride + column
    if ADD:
        total = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32) + values.to(tl.float32)
        values = total.to(x_ptr.dtype.element_ty)
    tl.store(x_ptrs, values, mask=mask)


def _combine(x: Tensor, rows: Tensor, table: Tensor, *, is_sum: bool) -> None:
    num_tokens, size = x.shape
    block = min(TILE, triton.next_power_of_2(size))
    if num_tokens:
        combine_rows_kernel[num_tokens, triton.cdiv(size, block)](
            x, rows, table, x.stride(0), table.stride(0), SIZE=size, BLOCK=block, ADD=is_sum
        )


@register("replace_rows", name="triton", predicate=is_cuda, priority=PRIORITY)
def replace_rows(x: Tensor, rows: Tensor, table: Tensor) -> None:
    _combine(x, rows, table, is_sum=False)


@register("add_rows", name="triton", predicate=is_cuda, priority=PRIORITY)
def add_rows(x: Tensor, rows: Tensor, table: Tensor) -> None:
    _combine(x, rows, table, is_sum=True)


def _gather(x: Tensor, indices: Tensor) -> Tensor:
    size = x.shape[1]
    out = x.new_empty(len(indices), size)
    block = min(TILE, triton.next_power_of_2(size))
    gather_rows_kernel[len(indices), triton.cdiv(size, block)](
        x, indices, out, len(x), x.stride(0), SIZE=size, BLOCK=block
    )
    return out


@register("embedding", name="triton", predicate=is_cuda, priority=PRIORITY)
def embedding(token_ids: Tensor, table: Tensor, first_if_absent: bool = False) -> Tensor:
    return _gather(table, token_ids)


@register("gather_rows", name="triton", predicate=is_cuda, priority=PRIORITY)
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    return _gather(x, indices)
