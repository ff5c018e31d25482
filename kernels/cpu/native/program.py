"""Where a wrapper's call goes: to the library at once, or, while a model is recorded, to the
recorder, which runs nothing.

Must not know: any operation, models, requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .calls import Call, Step
from .library import library

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

    from .recorder import Recorder

_NO_STEP = Step()


class _Thread(threading.local):
    # of this thread alone: another engine's step may be running in another
    recorder: Recorder | None = None


_thread = _Thread()


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for an operation's result. Every wrapper takes its results from here."""
    recorder = _thread.recorder
    return torch.empty(shape, dtype=dtype) if recorder is None else recorder.empty(shape, dtype)


def num_rows(x: Tensor) -> int:
    """A call's `rows` for operands with as many rows as x."""
    recorder = _thread.recorder
    return len(x) if recorder is None else recorder.num_rows(x)


def submit(call: Call, step: Step = _NO_STEP) -> None:
    """Does the call.

    `step`: where it finds what differs from step to step, if it reads any of that.
    """
    recorder = _thread.recorder
    if recorder is None:
        library.run(call, step)
    else:
        recorder.submit(call, step)


@contextlib.contextmanager
def recording(recorder: Recorder, guard: TorchDispatchMode) -> Iterator[None]:
    """Within it, this thread's calls are recorded."""
    _thread.recorder = recorder
    try:
        with guard:
            yield
    finally:
        _thread.recorder = None
