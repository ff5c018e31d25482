"""The kernels for NVIDIA GPUs are in Triton. Users need no other compiler than Triton's own.

Must not know: models, requests.

It is imported when operations for "cuda" are first selected (registry.select), so a CPU process
does not pay for the import. Where Triton is not installed nothing is registered and the reference
runs. No wrapper waits for the device or reads a tensor's contents, and grids depend on shapes
alone, so every launch can be recorded in a CUDA graph. tests/kernels/triton/ checks the kernels
without a GPU.
"""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from . import (
        activation,
        altup,
        attention,
        attention_encoder,
        blocks,
        choice,
        e4m3,
        few_rows,
        kv_cache,
        latent,
        linear,
        logits,
        logprobs,
        lora,
        moe,
        noise,
        norm,
        product,
        quantized,
        rotary,
        rows,
        sampling,
        slots,
        states,
    )
