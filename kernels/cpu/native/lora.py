"""Implements LoRA adapters by the native library.

Must not know: models, requests.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...registry import register
from .calls import MAX_LORA_SLICES, AddLora, Op, Step
from .program import empty, run_call
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
    step = Step(
        adapters=adapters.data_ptr(), logits_indices=None if indices is None else indices.data_ptr()
    )
    of_x = {"x": x, "in_features": x.shape[1], "by_logits": indices is not None}
    _run(Op.ADD_LORA, step, y, a, b, scales, ranks, slices, **of_x)


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
    of_x = {"x": None, "x_row": 0, "in_features": a.shape[1], "by_logits": False}
    _run(Op.ADD_LORA_EMBEDDING, step, y, a, b, scales, ranks, [y.shape[1]], **of_x)


def _run(
    op: Op,
    step: Step,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    slices: list[int],
    **of_x: Any,
) -> None:
    num_places, _, max_rank, _ = b.shape
    run_call(
        AddLora,
        op,
        y,
        step,
        dtype=DTYPES[b.dtype],
        a=a,
        b=b,
        scales=scales,
        ranks=ranks,
        y=y,
        low=empty(len(y), len(slices) * max_rank, dtype=torch.float32),
        out_features=sum(slices),
        num_places=num_places,
        num_slices=len(slices),
        max_rank=max_rank,
        y_dtype=DTYPES[y.dtype],
        begin=tuple(accumulate(slices, initial=0)),
        **of_x,
    )
