"""Implements RMS norms and layer norms by the native library.

Must not know: models, requests.
"""

from torch import Tensor

from ...registry import register
from .calls import AddLayerNorm, AddRmsNorm, LayerNorm, Op, RmsNorm
from .program import empty, run_call
from .tensors import DTYPES, PRIORITY, is_native


@register("rms_norm", name="native", predicate=is_native, priority=PRIORITY)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Heads are [rows, heads, size]. Views cost more than the norm of a few rows.
    heads = x if x.dim() in (2, 3) else x.reshape(-1, *x.shape[-2:])
    out = empty(*heads.shape, dtype=x.dtype)
    has_heads = heads.dim() == 3
    run_call(
        RmsNorm,
        Op.RMS_NORM,
        heads,
        x=heads,
        weight=weight,
        out=out,
        x_head=heads.stride(1) if has_heads else 0,
        out_head=out.stride(1) if has_heads else 0,
        heads=heads.shape[1] if has_heads else 1,
        size=heads.shape[-1],
        eps=eps,
        weight_dtype=DTYPES[weight.dtype],
    )
    return out if heads is x else out.view(x.shape)


@register("fused_add_rms_norm", name="native", predicate=is_native, priority=PRIORITY)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    run_call(
        AddRmsNorm,
        Op.ADD_RMS_NORM,
        x,
        x=x,
        residual=residual,
        weight=weight,
        size=x.shape[-1],
        eps=eps,
        weight_dtype=DTYPES[weight.dtype],
    )


@register("layer_norm", name="native", predicate=is_native, priority=PRIORITY)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    out = empty(*x.shape, dtype=x.dtype)
    operands = {"x": x, "weight": weight, "bias": bias, "out": out}
    run_call(LayerNorm, Op.LAYER_NORM, x, **operands, size=x.shape[1], eps=eps)
    return out


@register("fused_add_layer_norm", name="native", predicate=is_native, priority=PRIORITY)
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    operands = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    run_call(AddLayerNorm, Op.ADD_LAYER_NORM, x, **operands, size=x.shape[1], eps=eps)
