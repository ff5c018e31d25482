"""The structs of src/abi_ranks.h: see calls.py.

Must not know: what an operation computes, tensors.
"""

from ctypes import c_int64, c_void_p

from .calls import Call

LOST, LATE = 1, 2  # line 0: another rank has failed; LATE + r: rank r has not come in time
LINE_BYTES = 64


def header_bytes(num_ranks: int) -> int:
    """Of what the ranks of a group share, before their parts."""
    return -(-LINE_BYTES * (1 + num_ranks) // 4096) * 4096


class Exchange(Call):
    _fields_ = [
        *((name, c_void_p) for name in ("memory", "sequence")),
        *((name, c_int64) for name in ("rank", "num_ranks", "part_floats", "awake_ns")),
        ("timeout_ns", c_int64),
    ]


class AllReduce(Exchange):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("x_row", "out_row", "size", "x_dtype")),
    ]


class AllGather(Exchange):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out", "starts")),
        *((name, c_int64) for name in ("x_row", "out_row", "size")),
    ]
