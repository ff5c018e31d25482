"""RMS norms and layer norms of the native library.

Must not know: models, requests.
"""

from torch import Tensor

from ...registry import register
from .calls import AddLayerNorm, AddRmsNorm, LayerNorm, Op, RmsNorm
from .program import empty, num_rows, submit
from .tensors import DTYPES, PRIORITY, is_native


@register("rms_norm", name="native", predicate=is_native, priority=PRIORITY)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # [rows, heads, size]; views cost more than the norm of a few rows
    heads = x if x.dim() in (2, 3) else x.reshape(-1, *x.shape[-2:])
    out = empty(*heads.shape, dtype=x.dtype)
    has_heads = heads.dim() == 3
    call = RmsNorm(
        Op.RMS_NORM,
        DTYPES[x.dtype],
        num_rows(heads),
        heads.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        heads.stride(0),
        heads.stride(1) if has_heads else 0,
        out.stride(0),
        out.stride(1) if has_heads else 0,
        heads.shape[1] if has_heads else 1,
        heads.shape[-1],
        eps,
        DTYPES[weight.dtype],
    )
    submit(call)
    return out if heads is x else out.view(x.shape)


@register("fused_add_rms_norm", name="native", predicate=is_native, priority=PRIORITY)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    call = AddRmsNorm(
        Op.ADD_RMS_NORM,
        DTYPES[x.dtype],
        num_rows(x),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        x.stride(0),
        residual.stride(0),
        x.shape[-1],
        eps,
        DTYPES[weight.dtype],
    )
    submit(call)


@register("layer_norm", name="native", predicate=is_native, priority=PRIORITY)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    out = empty(*x.shape, dtype=x.dtype)
    call = LayerNorm(
        Op.LAYER_NORM,
        DTYPES[x.dtype],
        num_rows(x),
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        out.stride(0),
        x.shape[1],
        eps,
    )
    submit(call)
    return out


@register("fused_add_layer_norm", name="native", predicate=is_native, priority=PRIORITY)
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    call = AddLayerNorm(
        Op.ADD_LAYER_NORM,
        DTYPES[x.dtype],
        num_rows(x),
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        x.stride(0),
        residual.stride(0),
        x.shape[1],
        eps,
    )
    submit(call)
