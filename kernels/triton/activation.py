"""Gated activations in Triton.

Must not know: models, requests.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PLAIN, PRIORITY, TILE, is_cuda


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, 2 * SIZE] with strides, out [T, SIZE] contiguous. A program handles one block of one
    token's row.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    gate_ptrs = x_ptr + token * token_stride + column
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + SIZE, mask=mask, other=0.0)
    silu = (gate * tl.sigmoid(gate)).to(up.dtype)
    tl.store(
        out_ptr + token * SIZE + column,
        (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype),
        mask=mask,
    )


@register("silu_and_mul", name="triton", predicate=is_cuda, priority=PRIORITY)
def silu_and_mul(x: Tensor) -> Tensor:
    size = x.shape[1] // 2
    out = x.new_empty(len(x), size)
    block = min(TILE, triton.next_power_of_2(size))
    silu_and_mul_kernel[len(x), triton.cdiv(size, block)](
        x, out, x.stride(0), SIZE=size, BLOCK=block, **PLAIN
    )
    return out
