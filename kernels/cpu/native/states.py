"""Implements the operations of layers that keep a state by the native library.

Must not know: models, requests.
"""

from __future__ import annotations

from torch import Tensor

from ...ops import AttentionMetadata
from ...registry import register
from .calls import (
    Gate,
    GatedDeltaRule,
    GatedRmsNorm,
    Multiply,
    Op,
    SelectiveScan,
    ShortConv,
    Step,
)
from .program import empty, run_call
from .tensors import DTYPES, PRIORITY, is_native

GATES = {"none": Gate.GATE_NONE, "sigmoid": Gate.GATE_SIGMOID, "silu": Gate.GATE_SILU}


@register("multiply", name="native", predicate=is_native, priority=PRIORITY)
def multiply(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    out = empty(*x.shape, dtype=x.dtype)
    run_call(
        Multiply,
        Op.MULTIPLY,
        x,
        x=x,
        gate=gate,
        out=out,
        heads=x.shape[1],
        size=x.shape[2],
        gate_size=gate.shape[2],
        activation=GATES[activation],
    )
    return out


@register("gated_rms_norm", name="native", predicate=is_native, priority=PRIORITY)
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool
) -> Tensor:
    out = empty(*x.shape, dtype=x.dtype)
    run_call(
        GatedRmsNorm,
        Op.GATED_RMS_NORM,
        x,
        x=x,
        gate=gate,
        weight=weight,
        out=out,
        size=x.shape[1],
        group_size=group_size,
        weight_size=weight.shape[0],
        gate_first=gate_first,
        eps=eps,
        weight_dtype=DTYPES[weight.dtype],
    )
    return out


@register("short_conv", name="native", predicate=is_native, priority=PRIORITY)
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    metadata: AttentionMetadata,
    activation: str,
) -> Tensor:
    out = empty(*x.shape, dtype=x.dtype)
    run_call(
        ShortConv,
        Op.SHORT_CONV,
        x,
        _step(metadata),
        x=x,
        weight=weight,
        bias=bias,
        out=out,
        state=state,
        channels=x.shape[1],
        taps=weight.shape[1],
        activation=GATES[activation],
    )
    return out


@register("gated_delta_rule", name="native", predicate=is_native, priority=PRIORITY)
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    metadata: AttentionMetadata,
    is_interleaved: bool,
) -> Tensor:
    out = empty(*value.shape, dtype=value.dtype)
    run_call(
        GatedDeltaRule,
        Op.GATED_DELTA_RULE,
        value,
        _step(metadata),
        query=query,
        key=key,
        value=value,
        decay=decay,
        beta=beta,
        a_log=a_log,
        dt_bias=dt_bias,
        out=out,
        state=state,
        key_heads=key.shape[1],
        value_heads=value.shape[1],
        key_size=key.shape[2],
        value_size=value.shape[2],
        is_interleaved=is_interleaved,
        decays_rows=decay.dim() == 3,
    )
    return out


@register("selective_scan", name="native", predicate=is_native, priority=PRIORITY)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    out = empty(*x.shape, dtype=x.dtype)
    run_call(
        SelectiveScan,
        Op.SELECTIVE_SCAN,
        x,
        _step(metadata),
        x=x,
        dt=dt,
        b=b,
        c=c,
        a_log=a_log,
        d=d,
        dt_bias=dt_bias,
        out=out,
        state=state,
        heads=x.shape[1],
        head_size=x.shape[2],
        groups=b.shape[1],
        state_size=b.shape[2],
    )
    return out


def _step(metadata: AttentionMetadata) -> Step:
    rows = metadata.states
    assert rows is not None  # of a model with states
    return Step(
        num_requests=metadata.seq_lens.shape[0],
        query_start_loc=metadata.query_start_loc.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        state_places=rows.places.data_ptr(),
        last_positions=rows.last_positions.data_ptr(),
        copy_positions=rows.copy_positions.data_ptr(),
        copy_places=rows.copy_places.data_ptr(),
    )
