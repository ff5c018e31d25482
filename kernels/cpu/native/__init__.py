"""Native kernels for x86 and aarch64 CPUs are in a C++ library (src/) that is called with raw
pointers.

Must not know: models, requests.

The library does not link to torch and needs no compiler at run time.

    ops.rms_norm(x, w, eps) ─▶ norm.py: a Call ─▶ library.run ─▶ run.cpp ─▶ norm.inl, one per ISA
    a model's step          ─▶ program.py: all Calls, recorded once ─────▶ one library.run per step

Where the library is not built, or an x86 processor lacks AVX2, nothing is registered and torch's
kernels run instead.
"""

from .library import library

if library is not None:
    from . import (
        activation,
        altup,
        attention,
        experts,
        gguf,
        images,
        latent,
        linear,
        lora,
        norm,
        quantized,
        rotary,
        rows,
        sampling,
        states,
    )
