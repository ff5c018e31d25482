"""RMS norms of the native library.

Must not know: models, requests.
"""

from torch import Tensor

from ...registry import register
from .calls import AddRmsNorm, Op, RmsNorm
from .program import empty, num_rows, submit
from .tensors import DTYPES, PRIORITY, is_native


@register("rms_norm", name="native", predicate=is_native, priority=PRIORITY)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = x.unsqueeze(-2) if x.dim() < 3 else x.flatten(0, -3)  # [rows, heads, size]
    heads = heads.reshape(-1, *heads.shape[-2:])
    out = empty(*heads.shape, dtype=x.dtype)
    call = RmsNorm(
        Op.RMS_NORM,
        DTYPES[x.dtype],
        num_rows(heads),
        heads.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        heads.stride(0),
        heads.stride(1),
        out.stride(0),
        out.stride(1),
        heads.shape[1],
        heads.shape[2],
        eps,
        DTYPES[weight.dtype],
    )
    submit(call)
    return out.view(x.shape)


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
