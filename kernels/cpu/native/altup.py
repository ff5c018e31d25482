"""Implements the operations of several streams, and of sparse activations, by the native library.

Must not know: models, requests.
"""

from torch import Tensor

from ...registry import register
from .calls import AltupCorrect, AltupPredict, GaussianTopK, MatchMagnitude, Op, StackStreams
from .program import empty, run_call
from .tensors import PRIORITY, is_native


@register("stack_streams", name="native", predicate=is_native, priority=PRIORITY)
def stack_streams(x: Tensor, others: Tensor) -> Tensor:
    heads, size = others.shape[1:]
    out = empty(x.shape[0], 1 + heads, size, dtype=x.dtype)
    operands = {"x": x, "others": others, "out": out}
    run_call(StackStreams, Op.STACK_STREAMS, x, **operands, heads=heads, size=size)
    return out


@register("match_magnitude", name="native", predicate=is_native, priority=PRIORITY)
def match_magnitude(x: Tensor, like: Tensor) -> None:
    heads, size = x.shape[1:]
    run_call(MatchMagnitude, Op.MATCH_MAGNITUDE, x, x=x, like=like, heads=heads, size=size)


@register("altup_predict", name="native", predicate=is_native, priority=PRIORITY)
def altup_predict(streams: Tensor, routed: Tensor, weight: Tensor) -> Tensor:
    out = empty(*streams.shape, dtype=streams.dtype)
    run_call(
        AltupPredict,
        Op.ALTUP_PREDICT,
        streams,
        streams=streams,
        routed=routed,
        weight=weight,
        out=out,
        num_streams=streams.shape[1],
        size=streams.shape[2],
    )
    return out


@register("altup_correct", name="native", predicate=is_native, priority=PRIORITY)
def altup_correct(
    streams: Tensor, activated: Tensor, routed: Tensor, weight: Tensor, active: int
) -> None:
    run_call(
        AltupCorrect,
        Op.ALTUP_CORRECT,
        streams,
        streams=streams,
        activated=activated,
        routed=routed,
        weight=weight,
        num_streams=streams.shape[1],
        size=streams.shape[2],
        active=active,
    )


@register("gaussian_top_k", name="native", predicate=is_native, priority=PRIORITY)
def gaussian_top_k(x: Tensor, deviations: float) -> None:
    size = x.shape[1]
    run_call(GaussianTopK, Op.GAUSSIAN_TOP_K, x, x=x, size=size, deviations=deviations)
