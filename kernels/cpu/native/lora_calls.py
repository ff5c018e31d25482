"""The struct of src/abi_lora.h: see calls.py.

Must not know: what an operation computes (kernels/lora.py), tensors.
"""

from ctypes import c_int64, c_void_p

from .calls import Call

MAX_LORA_SLICES = 8
Begin = c_int64 * (MAX_LORA_SLICES + 1)


class AddLora(Call):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "a", "b", "scales", "ranks", "y", "low")),
        *((name, c_int64) for name in ("x_row", "y_row", "in_features", "out_features")),
        *((name, c_int64) for name in ("num_places", "num_slices", "max_rank")),
        *((name, c_int64) for name in ("y_dtype", "by_logits")),
        ("begin", Begin),
    ]
