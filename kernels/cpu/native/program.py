"""Routes a wrapper's call to the library, or to the recorder while a model is recorded.

Must not know: any operation, models, requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .calls import Call, Step
from .library import library
from .tensors import DTYPES

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    from .recorder import Recorder

_NO_STEP = Step()


class _Thread(threading.local):
    # It is thread-local, because another engine may run a step in another thread.
    recorder: Recorder | None = None


_thread = _Thread()


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocates an operation's result. Every wrapper allocates its results here."""
    recorder = _thread.recorder
    return torch.empty(shape, dtype=dtype) if recorder is None else recorder.empty(shape, dtype)


def num_rows(x: Tensor) -> int:
    """Returns the `rows` of a call whose operands have as many rows as x."""
    recorder = _thread.recorder
    # len() of a tensor is a function in Python, and slower.
    return x.shape[0] if recorder is None else recorder.num_rows(x)


def submit(call: Call, step: Step = _NO_STEP) -> None:
    """Runs or records the call.

    `step`: values that differ between steps, if the call reads any.
    """
    recorder = _thread.recorder
    if recorder is None:
        library.run(call, step)
    else:
        recorder.submit(call, step)


def run_call(
    kind: type[Call], op: int, rows: Tensor, step: Step = _NO_STEP, /, **fields: Any
) -> None:
    """Submits a call of `op` on the rows of `rows`, whose dtype is the call's unless one is given.

    A tensor among the fields stands for its address. The strides of an operand `x` are the fields
    `x_row` and `x_head`; those that are not given are taken from the tensor.
    """
    values: dict[str, Any] = {"op": op, "rows": num_rows(rows)}
    if "dtype" not in fields:
        values["dtype"] = DTYPES[rows.dtype]
    for name, value in fields.items():
        values[name] = value.data_ptr() if isinstance(value, Tensor) else value
    for name, operand, dimension in kind.strides:
        if name not in fields:
            values[name] = fields[operand].stride(dimension)
    submit(kind(**values), step)


def is_recording() -> bool:
    """Returns whether this thread's calls are recorded."""
    return _thread.recorder is not None


def part_ids(token_ids: Tensor, first_id: int) -> Tensor:
    """Returns, while a model is recorded, ids for a look-up in a table that begins with `first_id`.
    The look-up gives zeros for ids that the table does not have.
    """
    assert _thread.recorder is not None
    return _thread.recorder.part_ids(token_ids, first_id)


@contextlib.contextmanager
def recording(recorder: Recorder, guard: TorchDispatchMode) -> Iterator[None]:
    """Returns a context in which this thread's calls are recorded."""
    _thread.recorder = recorder
    try:
        with guard:
            yield
    finally:
        _thread.recorder = None
