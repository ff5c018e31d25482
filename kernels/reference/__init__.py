"""The reference specifies every operation in plain torch, on any device.

Must not know: speed. Loops are fine here.
"""

from . import (
    activation,
    altup,
    attention,
    choice,
    encoder,
    gguf_linear,
    grammar,
    images,
    latent,
    linear,
    lora,
    moe,
    norm,
    quantized,
    rotary,
    sampling,
    slots,
    states,
)
