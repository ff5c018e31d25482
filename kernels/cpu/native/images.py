"""Implements the operations of models that read images by the native library.

Must not know: models, requests.
"""

from torch import Tensor

from ...registry import register
from .calls import Clamp, Op, Step, TableRows
from .program import empty, run_call
from .rotary import rotate
from .tensors import PRIORITY, is_native


@register("replace_rows", name="native", predicate=is_native, priority=PRIORITY)
def replace_rows(x: Tensor, rows: Tensor, table: Tensor) -> None:
    _combine(Op.REPLACE_ROWS, x, rows, table)


@register("add_rows", name="native", predicate=is_native, priority=PRIORITY)
def add_rows(x: Tensor, rows: Tensor, table: Tensor) -> None:
    _combine(Op.ADD_ROWS, x, rows, table)


def _combine(op: Op, x: Tensor, rows: Tensor, table: Tensor) -> None:
    step = Step(num_tokens=x.shape[0], image_rows=rows.data_ptr())
    run_call(TableRows, op, x, step, x=x, table=table, size=x.shape[1])


@register("clamp", name="native", predicate=is_native, priority=PRIORITY)
def clamp(x: Tensor, bounds: Tensor) -> Tensor:
    out = empty(*x.shape, dtype=x.dtype)
    run_call(Clamp, Op.CLAMP, x, x=x, out=out, bounds=bounds, size=x.shape[1])
    return out


@register("rotary_embedding_by_component", name="native", predicate=is_native, priority=PRIORITY)
def rotary_embedding_by_component(
    positions: Tensor,
    offsets: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    components: Tensor,
) -> None:
    step = Step(
        num_tokens=query.shape[0],
        positions=positions.data_ptr(),
        position_offsets=offsets.data_ptr(),
        position_offset_row=offsets.stride(0),
    )
    rotate(Op.ROTARY, step, query, key, cos_sin_cache, components)
