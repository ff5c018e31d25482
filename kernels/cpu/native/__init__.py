"""Native kernels for x86 CPUs: a C++ library of our own (src/), called with raw pointers; no link
to torch, no compiler at run time.

Must not know: models, requests.

    ops.rms_norm(x, w, eps) ─▶ norm.py: a Call struct ─▶ library.run([call]) ─▶ run.cpp ─▶ norm.inl, compiled per instruction set
    a model's step          ─▶ program.py: all its Calls, recorded once ─────▶ one library.run per step

Where the library was not built, or the processor has not even AVX2, nothing is registered and
torch's kernels serve.
"""

from .library import library

if library is not None:
    from . import activation, attention, linear, norm, quantized, rotary, rows, sampling
