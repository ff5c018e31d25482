"""All wrappers share what is here: where native kernels apply, and how a tensor becomes an address.

Must not know: any operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...registry import Facts
from .calls import BF16, F32, INT8

PRIORITY = 15  # above kernels/cpu, below a user's kernel

DTYPES = {torch.bfloat16: BF16, torch.float32: F32}
CACHE_DTYPES = DTYPES | {torch.int8: INT8}
# See src/kv_cache.inl. The head_dim of an int8 cache is a multiple of INT8_MULTIPLE.
MAX_HEAD_DIM, INT8_MULTIPLE = 512, 16


def is_native(facts: Facts) -> bool:
    return facts.device == "cpu" and facts.dtype in DTYPES and facts.cpu_isa != "none"


def has_native_cache(facts: Facts) -> bool:
    if facts.kv_cache_dtype == torch.int8:
        return (
            is_native(facts)
            and 0 < facts.head_dim <= MAX_HEAD_DIM
            and facts.head_dim % INT8_MULTIPLE == 0
        )
    return is_native(facts) and not facts.converts_kv


def as_matrix(x: Tensor) -> Tensor:
    """x [..., size] as [rows, size], with a free row stride and contiguous rows. Copies only if
    needed.
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
