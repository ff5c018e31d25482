"""The operations of text encoders and their contracts; a part of ops.py.

Must not know: how an operation is implemented, models, requests.

T, H, NQ, NKV, D, "dtype": as in ops.py.
"""

# pyright: reportReturnType=false
# (a contract has no body)

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .registry import operation

if TYPE_CHECKING:
    from .ops import AttentionMetadata


@operation
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [T, H], weight and bias [H] -> [T, H]: (x - mean) / sqrt(variance + eps) * weight + bias.

    Ba et al. 2016. The variance is the mean of (x - mean)**2, from a second pass over the row. All
    of it is in fp32, rounded to dtype once.
    """


@operation
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    """In place, x and residual [T, H], weight and bias [H]: residual += x, then x =
    layer_norm(residual).

    The sum is rounded to dtype. Where norms come before the layers, `residual` goes on
    (ModernBERT); where they come after them, x does, and is the next call's `residual` (BERT).
    """


@operation
def gelu(x: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: x times the normal distribution's cumulative probability of x, which is
    (1 + erf(x / sqrt(2))) / 2.

    Hendrycks & Gimpel 2016. In fp32, rounded to dtype.
    """


@operation
def gelu_tanh(x: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: GELU's approximation by tanh. In fp32, rounded to dtype."""


@operation
def silu(x: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: x * sigmoid(x). In fp32, rounded to dtype."""


@operation
def relu(x: Tensor) -> Tensor:
    """x [T, I] -> [T, I]: max(x, 0), NaN for NaN."""


@operation
def gelu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I] -> [T, I]: gelu(first half) * second half.

    The GELU is rounded to dtype before the product.
    """


@operation
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of query [T, NQ, D] in both directions over key and value [T, NKV, D] of the same
    request -> [T, NQ, D].

    Devlin et al. 2018. Requests are those of metadata.query_start_loc, whole in this step; nothing
    else of the metadata is read on the device. NQ is a multiple of NKV: query head h reads KV head
    h // (NQ / NKV). A token sees all tokens of its request or, with window w > 0, those at a
    distance of at most w (Beltagy et al. 2020). With bias [NQ, 2 * R + 1] fp32, contiguous, bias[h,
    R + clamp(j - i, -R, R)] is added to the logit of query token i and key token j of head h
    (Raffel et al. 2020; MPNet). Softmax and sums are in fp32. Tokens of other requests do not
    affect a request's results, whatever they hold.
    """
