"""Where Triton's interpreter is switched on, kernels run under the guard, and memory that nobody
has filled holds NaN.
"""

import os

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from quire.tests.kernels.triton import guard  # noqa: F401  patches the interpreter

    # torch.empty then gives NaN, or the largest integer
    torch.use_deterministic_algorithms(True, warn_only=True)
