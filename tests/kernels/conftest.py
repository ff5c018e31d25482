"""With Triton's interpreter, kernels run under the guard, and uninitialised memory holds NaN."""

import os

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from quire.tests.kernels.triton import guard  # noqa: F401  patches the interpreter

    # torch.empty then fills with NaN, or with the largest integer
    torch.use_deterministic_algorithms(True, warn_only=True)
