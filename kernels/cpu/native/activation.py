"""The gated activation by the native library.

Must not know: models, requests.
"""

from torch import Tensor

from ...registry import register
from .calls import Op, SiluAndMul
from .program import empty, num_rows, submit
from .tensors import DTYPES, PRIORITY, is_native


@register("silu_and_mul", name="native", predicate=is_native, priority=PRIORITY)
def silu_and_mul(x: Tensor) -> Tensor:
    size = x.shape[-1] // 2
    out = empty(len(x), size, dtype=x.dtype)
    submit(
        SiluAndMul(
            Op.SILU_AND_MUL,
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
