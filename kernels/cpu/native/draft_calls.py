"""The structs of src/abi_drafts.h: see calls.py.

Must not know: what drafts, tensors.
"""

from ctypes import c_double, c_int64, c_void_p

from .calls import Call


class Drafts(Call):
    _fields_ = [
        *((name, c_void_p) for name in ("token_ids", "is_finite", "last", "kept")),
        *((name, c_void_p) for name in ("kept_finite", "accepted", "draw_positions")),
        *((name, c_void_p) for name in ("hidden", "state")),
        *((name, c_int64) for name in ("row_bytes", "depth", "kept_row", "block_size")),
        ("is_last", c_int64),
    ]


class SpreadLogits(Call):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "token_ids", "out")),
        *((name, c_int64) for name in ("x_row", "out_row", "size", "vocab_size")),
        ("absent", c_double),
    ]


class Lookups(Call):
    _fields_ = [
        *((name, c_void_p) for name in ("texts", "slots", "num_known", "most")),
        *((name, c_void_p) for name in ("columns", "sample", "token_ids", "is_finite")),
        *((name, c_void_p) for name in ("kept", "kept_finite", "starts", "accepted")),
        *((name, c_int64) for name in ("text_row", "least_equal", "most_equal", "block_size")),
    ]
