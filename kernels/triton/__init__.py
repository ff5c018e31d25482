"""Kernels for NVIDIA GPUs, in Triton: no compiler is needed on the user's machine beyond Triton's
own.

Must not know: models, requests.

Imported when operations for "cuda" are first asked for (registry.select): on a CPU nobody pays for
it. Where Triton is not installed nothing is registered, and the reference serves. No wrapper waits
for the device or reads a tensor's contents, and grids depend on shapes alone, so that all of them
can be recorded in a CUDA graph. Checked without a GPU by tests/kernels/triton/.
"""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from . import (
        activation,
        attention,
        kv_cache,
        linear,
        logits,
        logprobs,
        noise,
        norm,
        rotary,
        rows,
        sampling,
        slots,
    )
