"""Activations, scaling and adding by the native library.

Must not know: models, requests.
"""

from torch import Tensor

from ...registry import register
from .calls import Activate, Add, Op, Scale, SiluAndMul
from .program import empty, num_rows, submit
from .tensors import DTYPES, PRIORITY, is_native


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


def _activate(x: Tensor, op: Op) -> Tensor:
    size = x.shape[1]
    out = empty(x.shape[0], size, dtype=x.dtype)
    operands = x.data_ptr(), out.data_ptr(), x.stride(0), size, size
    submit(Activate(op, DTYPES[x.dtype], num_rows(x), *operands))
    return out


def _gate(x: Tensor, op: Op) -> Tensor:
    size = x.shape[-1] // 2
    out = empty(x.shape[0], size, dtype=x.dtype)
    submit(
        SiluAndMul(
            op,
            DTYPES[x.dtype],
            num_rows(x),
            x.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            size,
            size,
        )
    )
    return out


@register("scale", name="native", predicate=is_native, priority=PRIORITY)
def scale(x: Tensor, factor: float) -> None:
    submit(
        Scale(Op.SCALE, DTYPES[x.dtype], num_rows(x), x.data_ptr(), x.stride(0), x.shape[1], factor)
    )


@register("add", name="native", predicate=is_native, priority=PRIORITY)
def add(x: Tensor, residual: Tensor) -> None:
    submit(
        Add(
            Op.ADD,
            DTYPES[x.dtype],
            num_rows(x),
            x.data_ptr(),
            residual.data_ptr(),
            x.stride(0),
            residual.stride(0),
            x.shape[1],
        )
    )
