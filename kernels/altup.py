"""Declares the operations of models whose residual stream is several streams side by side, and of
MLPs that keep only their largest activations, with their contracts, for ops.py (Gemma 3n).

Must not know: how an operation is implemented, models, requests.

T, H, "dtype": as in ops.py; S is the number of streams. A token's results depend on its row alone,
and a NaN stays in its row.
"""

# pyright: reportReturnType=false
# (a contract has no body)

from __future__ import annotations

from torch import Tensor

from .registry import operation


@operation
def stack_streams(x: Tensor, others: Tensor) -> Tensor:
    """x [T, H], others [T, N, H] -> [T, 1 + N, H]: the streams, x first."""


@operation
def match_magnitude(x: Tensor, like: Tensor) -> None:
    """In place, x [T, N, H], like [T, H]: multiplies each of a token's N rows of x so that the root
    of its mean square becomes that of the token's row of `like`.

    The mean square of x counts as at least 1e-5. Computed in fp32, rounded once.
    """


@operation
def altup_predict(streams: Tensor, routed: Tensor, weight: Tensor) -> Tensor:
    """AltUp's prediction of what a layer makes of its streams (Baykal et al. 2023): streams [T, S,
    H] -> [T, S, H], where S <= 16.

    routed [T, S] and weight [S * S, S] fp32, contiguous. For each token, in fp32, with m =
    tanh(routed) and c = weight m, seen as [S, S], stream i becomes streams[i] + the sum of c[i, j]
    * streams[j] over j, rounded once.
    """


@operation
def altup_correct(
    streams: Tensor, activated: Tensor, routed: Tensor, weight: Tensor, active: int
) -> None:
    """AltUp's correction of predicted streams [T, S, H] by what the layer has made of the stream
    `active`: activated [T, H]. In place; S <= 16.

    routed [T, S] and weight [S, S] fp32, contiguous. For each token, in fp32, with c = 1 + weight
    tanh(routed), stream i becomes streams[i] + c[i] * (activated - streams[active]), rounded once.
    """


@operation
def gaussian_top_k(x: Tensor, deviations: float) -> None:
    """In place, x [T, I]: relu(x - cut), where cut is the row's mean plus `deviations` times its
    standard deviation. Of normally distributed numbers a known part stays (You et al. 2025).

    The deviation is the root of the mean square distance from the mean. Computed in fp32, rounded
    once.
    """
