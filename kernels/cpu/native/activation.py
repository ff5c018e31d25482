"""Implements activations, scaling and adding by the native library.

Must not know: models, requests.
"""

from torch import Tensor

from ...registry import register
from .calls import Activate, Add, Op, Scale, SiluAndMul, SoftCap
from .program import empty, run_call
from .tensors import PRIORITY, is_native


@register("silu_and_mul", name="native", predicate=is_native, priority=PRIORITY)
def silu_and_mul(x: Tensor) -> Tensor:
    return _gate(x, Op.SILU_AND_MUL)


@register("gelu_tanh_and_mul", name="native", predicate=is_native, priority=PRIORITY)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    return _gate(x, Op.GELU_TANH_AND_MUL)


@register("gelu_and_mul", name="native", predicate=is_native, priority=PRIORITY)
def gelu_and_mul(x: Tensor) -> Tensor:
    return _gate(x, Op.GELU_AND_MUL)


@register("gelu", name="native", predicate=is_native, priority=PRIORITY)
def gelu(x: Tensor) -> Tensor:
    return _activate(x, Op.GELU)


@register("gelu_tanh", name="native", predicate=is_native, priority=PRIORITY)
def gelu_tanh(x: Tensor) -> Tensor:
    return _activate(x, Op.GELU_TANH)


@register("silu", name="native", predicate=is_native, priority=PRIORITY)
def silu(x: Tensor) -> Tensor:
    return _activate(x, Op.SILU)


@register("relu", name="native", predicate=is_native, priority=PRIORITY)
def relu(x: Tensor) -> Tensor:
    return _activate(x, Op.RELU)


@register("relu_squared", name="native", predicate=is_native, priority=PRIORITY)
def relu_squared(x: Tensor) -> Tensor:
    return _activate(x, Op.RELU_SQUARED)


def _activate(x: Tensor, op: Op) -> Tensor:
    out = empty(*x.shape, dtype=x.dtype)
    run_call(Activate, op, x, x=x, out=out, size=x.shape[1])
    return out


def _gate(x: Tensor, op: Op) -> Tensor:
    out = empty(x.shape[0], x.shape[-1] // 2, dtype=x.dtype)
    run_call(SiluAndMul, op, x, x=x, out=out, size=out.shape[1])
    return out


@register("scale", name="native", predicate=is_native, priority=PRIORITY)
def scale(x: Tensor, factor: float) -> None:
    run_call(Scale, Op.SCALE, x, x=x, size=x.shape[1], factor=factor)


@register("soft_cap", name="native", predicate=is_native, priority=PRIORITY)
def soft_cap(logits: Tensor, cap: float) -> None:
    run_call(SoftCap, Op.SOFT_CAP, logits, x=logits, size=logits.shape[1], cap=cap)


@register("add", name="native", predicate=is_native, priority=PRIORITY)
def add(x: Tensor, residual: Tensor) -> None:
    run_call(Add, Op.ADD, x, x=x, residual=residual, size=x.shape[1])
