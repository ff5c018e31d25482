"""LoRA adapters of the native library.

Must not know: models, requests.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from ...registry import register
from .calls import Op, Step
from .lora_calls import MAX_LORA_SLICES, AddLora, Begin
from .program import empty, num_rows, submit
from .tensors import DTYPES, PRIORITY, as_matrix, is_native


@register("add_lora", name="native", predicate=is_native, priority=PRIORITY)
def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    adapters: Tensor,
    indices: Tensor | None,
    slices: list[int],
) -> None:
    if len(slices) > MAX_LORA_SLICES:
        raise ValueError(f"slices: at most {MAX_LORA_SLICES}, got {len(slices)}")
    x = as_matrix(x)
    step = Step(adapters=adapters.data_ptr())
    if indices is not None:
        step.logits_indices = indices.data_ptr()
    call = _call(Op.ADD_LORA, y, a, b, scales, ranks, slices)
    call.x, call.x_row, call.in_features = x.data_ptr(), x.stride(0), x.shape[1]
    call.by_logits = indices is not None
    submit(call, step)


@register("add_lora_embedding", name="native", predicate=is_native, priority=PRIORITY)
def add_lora_embedding(
    y: Tensor,
    token_ids: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    adapters: Tensor,
) -> None:
    if token_ids.dtype != torch.int32:
        token_ids = token_ids.int()
    call = _call(Op.ADD_LORA_EMBEDDING, y, a, b, scales, ranks, [b.shape[2]])
    call.in_features = a.shape[1]
    submit(call, Step(adapters=adapters.data_ptr(), token_ids=token_ids.data_ptr()))


def _call(
    op: Op, y: Tensor, a: Tensor, b: Tensor, scales: Tensor, ranks: Tensor, slices: list[int]
) -> AddLora:
    """All but x."""
    num_places, max_rank, out_features = b.shape
    low = empty(len(y), len(slices) * max_rank, dtype=torch.float32)
    begin = list(accumulate(slices, initial=0))
    return AddLora(
        op,
        DTYPES[b.dtype],
        num_rows(y),
        a=a.data_ptr(),
        b=b.data_ptr(),
        scales=scales.data_ptr(),
        ranks=ranks.data_ptr(),
        y=y.data_ptr(),
        low=low.data_ptr(),
        y_row=y.stride(0),
        out_features=out_features,
        num_places=num_places,
        num_slices=len(slices),
        max_rank=max_rank,
        y_dtype=DTYPES[y.dtype],
        begin=Begin(*begin),
    )
