"""Declares the operations of models that read images, with their contracts. ops.py states the
conventions and re-exports these.

Must not know: how an operation is implemented, models, requests, how an image is encoded.
"""

# pyright: reportReturnType=false
# (a contract has no body)

from __future__ import annotations

from torch import Tensor

from .registry import operation


@operation
def replace_rows(x: Tensor, rows: Tensor, table: Tensor) -> None:
    """In place, x [T, H]: x[t] becomes table[rows[t]] where rows[t] >= 0.

    rows [T] i32, each below N; table [N, H], whose rows may be parts of longer ones. Rows of the
    table that no token reads may hold anything.
    """


@operation
def add_rows(x: Tensor, rows: Tensor, table: Tensor) -> None:
    """In place, x [T, H]: x[t] += table[rows[t]] where rows[t] >= 0, rounded to dtype. The
    arguments are those of replace_rows (Qwen3-VL: DeepStack; Meng et al. 2024).
    """


@operation
def clamp(x: Tensor, bounds: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: each number between bounds[0] and bounds[1], NaN for NaN.

    bounds [2] fp32, contiguous, are rounded to dtype (Gemma 4: clipped linear layers).
    """


@operation
def rotary_embedding_by_component(
    positions: Tensor,
    offsets: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    components: Tensor,
) -> None:
    """In place, query [T, NQ, D] and key [T, NKV, D]: rotary_embedding where pair i turns by the
    position positions[t] + offsets[components[i], t] (Qwen2-VL: M-RoPE; Wang et al. 2024).

    offsets [3, T] i32; components [R / 2] i32, each 0, 1 or 2. All these positions are in [0,
    max_position). The other arguments are those of rotary_embedding.
    """
