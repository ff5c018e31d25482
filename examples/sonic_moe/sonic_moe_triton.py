"""The GPU kernel of the plugin: a grouped GEMM that gathers its rows and scatters its results."""

import torch
import triton
import triton.language as tl
from quire.kernels import ops
from sonic_moe import add_in_order
from torch import Tensor

ROWS, COLUMNS, DEPTH = tl.constexpr(16), tl.constexpr(64), tl.constexpr(64)  # of a block


@triton.jit
def grouped_gemm(x, w, out, order, starts, n, k, per_row):
    """out[pair] = w[expert] x[pair // per_row] for the pairs order[starts[e] : starts[e + 1]]."""
    expert = tl.program_id(0)
    first = tl.load(starts + expert) + tl.program_id(1) * ROWS
    end = tl.load(starts + expert + 1)
    if first >= end:
        return
    rows = first + tl.arange(0, ROWS)
    pairs = tl.load(order + rows, mask=rows < end, other=0)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        a = tl.load(x + (pairs // per_row)[:, None] * k + depth, mask=depth[None] < k, other=0)
        inside = (columns < n)[None] & (depth < k)[:, None]
        at = expert.to(tl.int64) * n * k + columns[None] * k + depth[:, None]
        total = tl.dot(a, tl.load(w + at, mask=inside, other=0), total, input_precision="ieee")
    inside = (rows < end)[:, None] & (columns < n)[None]
    tl.store(out + pairs[:, None] * n + columns, total.to(out.dtype.element_ty), mask=inside)


def multiply(x: Tensor, w: Tensor, order, starts, per_row: int, dtype: torch.dtype) -> Tensor:
    experts, n, k = w.shape
    out = torch.empty(len(order), n, dtype=dtype, device=x.device)
    grid = experts, triton.cdiv(len(order), ROWS.value), triton.cdiv(n, COLUMNS.value)
    grouped_gemm[grid](x.contiguous(), w, out, order, starts, n, k, per_row)
    return out


def pack(gate_up: Tensor, down: Tensor):
    def run(x: Tensor, expert_ids: Tensor) -> Tensor:
        top_k = expert_ids.shape[1]
        by_expert, order = expert_ids.flatten().long().sort(stable=True)
        starts = torch.searchsorted(by_expert, torch.arange(len(down) + 1, device=x.device))
        inner = ops.silu_and_mul(multiply(x, gate_up, order, starts, top_k, x.dtype))
        return add_in_order(multiply(inner, down, order, starts, 1, torch.float32), top_k, x.dtype)

    return run
