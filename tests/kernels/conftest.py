"""Where Triton's interpreter is switched on, kernels run under the guard, and memory that nobody has filled holds NaN.
May know: TRITON_INTERPRET, the guard.
Must not know: any kernel."""

import os

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from quire.tests.kernels.triton import guard  # noqa: F401  patches the interpreter

    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then gives NaN, or the largest integer
