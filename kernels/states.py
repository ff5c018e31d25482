"""Declares the operations of layers that keep a state of fixed size, with their contracts, for
ops.py: short convolutions, Gated DeltaNet, Mamba 2, and what stands between them.

Must not know: how an operation is implemented, models, requests.

T, B, "dtype": as in ops.py. The memory of a state has S places. Each request of a step has a place
of its own (StateRows). A row whose first token has position 0 begins with zeros, whatever its place
holds; any other row begins with its place's content. Tokens are computed one after another, each
from the state that the one before it has left, in an order of sums that depends on nothing else. So
a row's bits are the same however its tokens are divided into steps, and whatever runs beside it.
"""

# pyright: reportReturnType=false
# (a contract has no body)

from __future__ import annotations

from torch import Tensor

from .metadata import AttentionMetadata
from .registry import operation


@operation
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    metadata: AttentionMetadata,
    activation: str,
) -> Tensor:
    """Depthwise causal convolution over the tokens of each request: x [T, C] -> [T, C].

    weight [C, K] and bias [C] of dtype. Token t gives activation(bias + the sum of weight[:, k] *
    x[t - K + 1 + k] for k = 0 to K - 1), summed in fp32 in this order; the result is rounded once.
    activation: "silu" or "none". state [S, K - 1, C] of dtype: the last K - 1 rows of x, the oldest
    first. A place's memory is contiguous; the distance between places is free.
    """


@operation
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
    """The recurrence of Gated DeltaNet (Yang et al. 2024), with state [S, HV, DK, DV] fp32.

    query and key [T, HK, DK], value [T, HV, DV], decay and beta [T, HV], all of dtype and not yet
    activated; a_log and dt_bias [HV] fp32 -> [T, HV, DV]. HV is a multiple of HK: value head h has
    key head h // (HV // HK), or h % HK if is_interleaved. With decay [T, HV, DK] and dt_bias [HV,
    DK], each row of S has its own exp(g) (Kimi Delta Attention; Moonshot AI 2025). For each token
    and value head, in fp32:

        q = query / sqrt(sum(query ** 2) + 1e-6) / sqrt(DK),  k = key / sqrt(sum(key ** 2) + 1e-6)
        b = sigmoid(beta) rounded to dtype,  g = -exp(a_log) * softplus(decay + dt_bias)
        S = exp(g) * S,  d = b * (value - S^T k),  S = S + k d^T,  result = S^T q

    The distance between the places of `state` is free, the rest is contiguous.
    """


@operation
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
    """The recurrence of Mamba 2 (Dao & Gu 2024), with state [S, NH, DH, N] fp32.

    x [T, NH, DH], dt [T, NH] not yet activated, b and c [T, G, N], all of dtype; a_log, d and
    dt_bias [NH] fp32 -> [T, NH, DH]. NH is a multiple of G: head h has group h // (NH // G). For
    each token and head, in fp32:

        dt = softplus(dt + dt_bias)
        S = S * exp(-dt * exp(a_log)) + (dt * x) b^T,  result = S c + d * x

    The distance between the places of `state` is free, the rest is contiguous.
    """


@operation
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, gate_first: bool
) -> Tensor:
    """RMS norm of each group of group_size elements of a row, with a gate: x and gate [T, N] ->
    [T, N].

    N is a multiple of group_size; weight [N] or [group_size], which then serves every group. In
    fp32, with s = silu(gate): gate_first (Mamba 2) gives rms(x * s) * weight, rounded once. Else
    (Gated DeltaNet), rms(x) is rounded to dtype, multiplied by weight, and then by s.
    """


@operation
def multiply(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """x [T, H, D] times activation(gate), computed in fp32 and rounded once -> [T, H, D].

    gate [T, H, D], or [T, H, 1]: one number for each head. activation: "none", "sigmoid" or "silu".
    """
