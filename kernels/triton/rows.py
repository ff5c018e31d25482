"""Gathers rows of tables in Triton: the embedding's, and those of the tokens whose logits are
needed.

Must not know: models, requests.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, TILE, is_cuda


@triton.jit
def gather_rows_kernel(
    x_ptr, indices_ptr, out_ptr, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    index = tl.load(indices_ptr + row).to(tl.int64)
    tl.store(
        out_ptr + row * SIZE + column,
        tl.load(x_ptr + index * row_stride + column, mask=mask),
        mask=mask,
    )


def _gather(x: Tensor, indices: Tensor) -> Tensor:
    size = x.shape[1]
    out = x.new_empty(len(indices), size)
    block = min(TILE, triton.next_power_of_2(size))
    gather_rows_kernel[len(indices), triton.cdiv(size, block)](
        x, indices, out, x.stride(0), SIZE=size, BLOCK=block
    )
    return out


@register("embedding", name="triton", predicate=is_cuda, priority=PRIORITY)
def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    return _gather(table, token_ids)


@register("gather_rows", name="triton", predicate=is_cuda, priority=PRIORITY)
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    return _gather(x, indices)
