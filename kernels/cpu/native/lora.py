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
    call = AddLora(
        x=x.data_ptr(),
        x_row=x.stride(0),
        in_features=x.shape[1],
        by_logits=indices is not None,
    )
    _submit(Op.ADD_LORA, call, step, y, a, b, scales, ranks, slices)


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
    step = Step(adapters=adapters.data_ptr(), token_ids=token_ids.data_ptr())
    call = AddLora(in_features=a.shape[1])
    _submit(Op.ADD_LORA_EMBEDDING, call, step, y, a, b, scales, ranks, [y.shape[1]])


def _submit(
    op: Op,
    call: AddLora,
    step: Step,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    slices: list[int],
) -> None:
    """Fills in what both operations have, and submits the call."""
    call.num_places, _, call.max_rank, _ = b.shape
    call.out_features = sum(slices)
    # read until the call has run
    low = empty(len(y), len(slices) * call.max_rank, dtype=torch.float32)
    call.op, call.dtype, call.rows = op, DTYPES[b.dtype], num_rows(y)
    call.a, call.b, call.y, call.low = (x.data_ptr() for x in (a, b, y, low))
    call.scales, call.ranks = scales.data_ptr(), ranks.data_ptr()
    call.y_row, call.y_dtype, call.num_slices = y.stride(0), DTYPES[y.dtype], len(slices)
    call.begin = Begin(*accumulate(slices, initial=0))
    submit(call, step)
