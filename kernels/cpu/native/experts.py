"""Implements mixtures of experts by the native library.

Must not know: models, requests.

    route_experts ─▶ ids ─▶ SORT_BY_EXPERT: places in the order of experts
                               ─▶ EXPERTS_LINEAR: gate and up of each expert's places, gated
                               ─▶ EXPERTS_LINEAR: down
                               ─▶ COMBINE_EXPERTS: each token's sum
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...moe import UNGATED, ClampedSwiGLU, Experts
from ...reference import moe as reference
from ...registry import register
from .calls import (
    F32,
    MAX_EXPERTS,
    AddGated,
    CombineExperts,
    CountExperts,
    Epilogue,
    ExpertsLinear,
    Op,
    RouteExperts,
    ScaleByExpert,
    SortByExpert,
)
from .gguf import PackedGgufLinear
from .linear import NativeLinear
from .program import empty, run_call
from .tensors import DTYPES, PRIORITY, as_matrix, is_native

_EPILOGUES = {
    "silu": Epilogue.GATED,
    "gelu_tanh": Epilogue.GATED_GELU_TANH,
    "relu_squared": Epilogue.RELU_SQUARED,
}


@register("route_experts", name="native", predicate=is_native, priority=PRIORITY)
def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_best: int = 2,
    added: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    _check_count(logits.shape[1])
    ids = empty(len(logits), top_k, dtype=torch.int32)
    weights = empty(len(logits), top_k, dtype=torch.float32)
    run_call(
        RouteExperts,
        Op.ROUTE_EXPERTS,
        logits,
        logits=logits,
        bias=bias,
        ids=ids,
        weights=weights,
        count=logits.shape[1],
        top_k=top_k,
        is_sigmoid={"softmax": False, "sigmoid": True}[scoring],
        renormalize=renormalize,
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=group_best,
        scale=scale,
        added=added,
    )
    return ids, weights


@register("fused_moe", name="native", predicate=is_native, priority=PRIORITY)
def fused_moe(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    if (found := _tables_of(experts)) is None:
        return reference.fused_moe(x, expert_ids, weights, experts)
    returned, place_of = _computed(x, expert_ids, experts, found)
    return _combined(returned, place_of, weights, x.dtype)


@register("expert_outputs", name="native", predicate=is_native, priority=PRIORITY)
def expert_outputs(x: Tensor, expert_ids: Tensor, experts: Experts) -> Tensor:
    found = _tables_of(experts)
    if found is None or not len(x):
        return reference.expert_outputs(x, expert_ids, experts)
    returned, place_of = _computed(x, expert_ids.contiguous(), experts, found)
    return returned[place_of]


@register("weighted_sum", name="native", predicate=is_native, priority=PRIORITY)
def weighted_sum(returned: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    if not len(returned):
        return reference.weighted_sum(returned, weights, dtype)
    place_of = torch.arange(weights.numel(), dtype=torch.int32).view(weights.shape)
    return _combined(returned.contiguous().flatten(0, 1), place_of, weights.contiguous(), dtype)


def _tables_of(experts: Experts) -> tuple[_Table, _Table] | None:
    """Returns what _tables does, which is made once. Without tables a program cannot be recorded,
    and the log says so.
    """
    if "native" not in experts.scratch:
        experts.scratch["native"] = _tables(experts)
    return experts.scratch["native"]


def _computed(
    x: Tensor, expert_ids: Tensor, experts: Experts, tables: tuple[_Table, _Table]
) -> tuple[Tensor, Tensor]:
    """Returns what the experts return, [places, H] fp32 in the order of experts, and the places of
    each token's experts, [T, K] i32.
    """
    gate_up, down = tables
    x, (num_tokens, top_k), count = as_matrix(x), expert_ids.shape, len(experts.down)
    _check_count(count)
    places = num_tokens * top_k
    starts, tokens = empty(count + 1, dtype=torch.int32), empty(places, dtype=torch.int32)
    place_of = empty(num_tokens, top_k, dtype=torch.int32)
    run_call(
        SortByExpert,
        Op.SORT_BY_EXPERT,
        x,
        ids=expert_ids,
        starts=starts,
        tokens=tokens,
        places=place_of,
        counts=None,
        count=count,
        top_k=top_k,
    )
    inner = empty(places, down.in_features, dtype=x.dtype)
    gate_up.multiply(x, inner, x, starts, tokens, top_k, *_gate(experts.activation))
    returned = empty(places, down.out_features, dtype=torch.float32)
    down.multiply(inner, returned, x, starts, None, top_k, Epilogue.PLAIN)
    return returned, place_of


def _combined(returned: Tensor, place_of: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    num_tokens, top_k = place_of.shape
    out = empty(num_tokens, returned.shape[1], dtype=dtype)
    run_call(
        CombineExperts,
        Op.COMBINE_EXPERTS,
        out,
        x=returned,
        places=place_of,
        weights=weights,
        out=out,
        size=returned.shape[1],
        top_k=top_k,
    )
    return out


@register("count_experts", name="native", predicate=is_native, priority=PRIORITY)
def count_experts(ids: Tensor, slots: Tensor | None, counts: Tensor) -> None:
    run_call(
        CountExperts,
        Op.COUNT_EXPERTS,
        ids,
        dtype=F32,
        ids=ids,
        slots=slots,
        counts=counts,
        count=len(counts),
        top_k=ids.shape[1],
    )


@register("scale_by_expert", name="native", predicate=is_native, priority=PRIORITY)
def scale_by_expert(weights: Tensor, ids: Tensor, scales: Tensor) -> None:
    run_call(
        ScaleByExpert,
        Op.SCALE_BY_EXPERT,
        weights,
        weights=weights,
        ids=ids,
        scales=scales,
        top_k=ids.shape[1],
    )


@register("add_gated", name="native", predicate=is_native, priority=PRIORITY)
def add_gated(x: Tensor, gate: Tensor, out: Tensor) -> None:
    run_call(AddGated, Op.ADD_GATED, x, x=x, gate=gate, out=out, size=x.shape[1])


@dataclass(frozen=True)
class _Kind:
    """What all layers of a table have in common."""

    op: Op
    of_one: Op  # the operation of one layer
    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True)
class _Table:
    """One linear layer of all experts: the addresses of their weights, [E] i64 each. The packed
    layers own the weights.
    """

    kind: _Kind
    weights: ctypes.Array
    scales: ctypes.Array | None
    biases: ctypes.Array | None

    @property
    def in_features(self) -> int:
        return self.kind.in_features

    @property
    def out_features(self) -> int:
        return self.kind.out_features

    def multiply(
        self,
        x: Tensor,
        out: Tensor,
        of_tokens: Tensor,
        starts: Tensor,
        tokens: Tensor | None,
        top_k: int,
        epilogue: Epilogue,
        gate_scale: float = 0.0,
        gate_limit: float = 0.0,
    ) -> None:
        """`of_tokens` has as many rows as tokens, and x's dtype."""
        run_call(
            ExpertsLinear,
            self.kind.op,
            of_tokens,
            x=x,
            weight=None,
            bias=None,
            out=out,
            in_features=self.in_features,
            out_features=self.out_features,
            epilogue=epilogue,
            out_dtype=DTYPES[out.dtype],
            gate_scale=gate_scale,
            gate_limit=gate_limit,
            scales=None,
            weights=ctypes.addressof(self.weights),
            all_scales=None if self.scales is None else ctypes.addressof(self.scales),
            biases=None if self.biases is None else ctypes.addressof(self.biases),
            starts=starts,
            tokens=tokens,
            count=len(self.weights),
            top_k=top_k,
            kind=self.kind.of_one,
        )


def _gate(activation: str | ClampedSwiGLU) -> tuple[Epilogue, float, float]:
    if isinstance(activation, ClampedSwiGLU):
        return Epilogue.GATED_CLAMPED, activation.scale, activation.limit
    return _EPILOGUES[activation], 0.0, 0.0


def _tables(experts: Experts) -> tuple[_Table, _Table] | None:
    """Returns None where the layers are not all alike, or cannot be gated as they are."""
    gate_up, down = _table(experts.gate_up), _table(experts.down)
    if gate_up is None or down is None:
        return None
    is_gated = experts.activation not in UNGATED
    can_gate = all(getattr(layer, "can_gate", False) for layer in experts.gate_up)
    return None if is_gated and not can_gate else (gate_up, down)


def _table(layers: Sequence[Any]) -> _Table | None:
    kinds = {_kind_of(layer) for layer in layers}
    if len(kinds) != 1 or (kind := kinds.pop()) is None:
        return None
    parts = [layer.parts[0] for layer in layers]
    return _Table(
        kind,
        _addresses([part.numbers for part in parts]),
        None if kind.op == Op.EXPERTS_LINEAR else _addresses([part.scales for part in parts]),
        _addresses([layer.bias for layer in layers]) if kind.has_bias else None,
    )


def _kind_of(layer: Any) -> _Kind | None:
    """Returns None for a layer that the library does not multiply as one of many."""
    if not isinstance(layer, NativeLinear) or len(layer.parts) != 1:
        return None
    type = layer.parts[0].type
    of_one = Op.LINEAR if type is None else Op[f"LINEAR_{type}"]
    op = Op.EXPERTS_LINEAR_BLOCKS
    if not isinstance(layer, PackedGgufLinear):
        op = Op[f"EXPERTS_{of_one.name}"]
    return _Kind(op, of_one, layer.in_features, layer.out_features, layer.bias is not None)


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array:
    """The result is no tensor, because this may be called while a model is recorded."""
    return (ctypes.c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _check_count(count: int) -> None:
    if count > MAX_EXPERTS:
        raise ValueError(f"a layer has {count} experts, native kernels support {MAX_EXPERTS}")
