"""The GPU kernel of the plugin: a grouped GEMM that gathers its rows and scatters its results."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from quire.kernels import ops
from sonic_moe import add_in_order
from torch import Tensor

ROWS, COLUMNS, DEPTH = 16, 64, 64


@triton.jit
def grouped_gemm(
    x, w, out, order, starts, n, k, per_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
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


def pack(gate_up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def multiply(x: Tensor, w: Tensor, order, starts, per_row: int, dtype) -> Tensor:
        (experts, n, k), count = w.shape, len(order)
        out = torch.empty(count, n, dtype=dtype, device=x.device)
        grid = experts, triton.cdiv(count, ROWS), triton.cdiv(n, COLUMNS)
        grouped_gemm[grid](
            x.contiguous(), w, out, order, starts, n, k, per_row, ROWS, COLUMNS, DEPTH
        )
        return out

    def run(x: Tensor, expert_ids: Tensor) -> Tensor:
        pairs, top_k = expert_ids.flatten(), expert_ids.shape[1]
        order = pairs.argsort(stable=True)
        ids = torch.arange(len(gate_up) + 1, device=x.device, dtype=pairs.dtype)
        starts = torch.searchsorted(pairs[order], ids)
        inner = ops.silu_and_mul(multiply(x, gate_up, order, starts, top_k, x.dtype))
        results = multiply(inner, down, order, starts, 1, torch.float32)
        return add_in_order(results, top_k, x.dtype)

    return run
