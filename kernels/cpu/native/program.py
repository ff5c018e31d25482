"""Where a wrapper's call goes: to the library at once, or, while a model is recorded, into a program that runs as a whole later.
May know: torch on CPUs, the library.
Must not know: any operation, models, requests."""

from __future__ import annotations

import torch
from torch import Tensor

from .calls import Call, Step
from .library import library

_NO_STEP = Step()


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory for an operation's result. Every wrapper takes its results from here."""
    return torch.empty(shape, dtype=dtype)


def num_rows(x: Tensor) -> int:
    """A call's `rows` for operands with as many rows as x."""
    return len(x)


def submit(call: Call, step: Step = _NO_STEP) -> None:
    """Does the call. `step`: where it finds what differs from step to step, if it reads any of that."""
    library.run(call, step)
