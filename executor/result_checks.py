"""Checks the results of kernels from outside the package: those that read them do not check sizes,
and would read beyond a tensor that is too small.

Must not know: which packages are installed, models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..kernels.registry import Implementation, OpTable, implementations
from .plugins import PluginFault, describe_module


def _like(x: Tensor, *others: Any, **named: Any) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.dtype


def _half(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return (*x.shape[:-1], x.shape[-1] // 2), x.dtype


# operation -> from its arguments: shape and dtype of the result, by its contract
RESULTS: dict[str, Callable[..., tuple[tuple[int, ...], torch.dtype]]] = {
    "embedding": lambda token_ids, table, *others, **named: (
        (*token_ids.shape, table.shape[1]),
        table.dtype,
    ),
    "gather_rows": lambda x, indices: ((len(indices), *x.shape[1:]), x.dtype),
    "spread_logits": lambda logits, ids, vocab_size: ((len(logits), vocab_size), torch.float32),
    "rms_norm": _like,
    "silu_and_mul": _half,
    "gelu_tanh_and_mul": _half,
    "paged_attention": lambda query, *others, **named: _like(query),
    "fused_moe": _like,
    **dict.fromkeys(("layer_norm", "gelu", "gelu_tanh", "silu", "relu", "relu_squared"), _like),
    "clamp": _like,
    **dict.fromkeys(("short_conv", "selective_scan", "gated_rms_norm", "multiply"), _like),
    "gated_delta_rule": lambda query, key, value, *others, **named: _like(value),
    "gelu_and_mul": _half,
    "encoder_attention": lambda query, *others, **named: _like(query),
    "sample_tokens": lambda logits, *others, **named: ((len(logits),), torch.int64),
}


def check_results(ops: OpTable) -> None:
    """Replaces kernels from outside by ones that raise PluginFault for a wrong result. Kernels of
    the native program are compared with the model's code where it is recorded.
    """
    for op in RESULTS:
        [chosen] = (one for one in implementations(op) if one.name == ops.chosen[op])
        if not chosen.function.__module__.startswith("quire.") and not chosen.is_native:
            ops.replace(op, checked(chosen))


def checked(implementation: Implementation) -> Callable[..., Tensor]:
    function, expect = implementation.function, RESULTS[implementation.op]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        shape, dtype = expect(*args, **kwargs)
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor):
            found = type(result).__name__
        elif result.shape == shape and result.dtype == dtype:
            return result
        else:
            found = f"{list(result.shape)} {result.dtype}"
        raise PluginFault(
            f"{describe_module(function.__module__)} failed: its implementation "
            f"{implementation.name!r} of {implementation.op} returns {found}, not {list(shape)} "
            f"{dtype}"
        )

    call.func = function  # type: ignore[attr-defined]  # for traces: where it is defined
    return call
