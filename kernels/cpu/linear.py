"""Multiplies by weights on the CPU. A bf16 weight is packed once for oneDNN.

Must not know: models, requests.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cpu


@register("embedding", name="cpu", predicate=is_cpu, priority=PRIORITY)
def embedding(token_ids: Tensor, table: Tensor, first_if_absent: bool = False) -> Tensor:
    rows = token_ids * (token_ids < len(table)) if first_if_absent else token_ids
    return F.embedding(rows, table)


@register("pack_linear", name="cpu", predicate=is_cpu, priority=PRIORITY)
def pack_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    # F.linear packs a bf16 weight for oneDNN's matrix units in every call. At T = 1 this takes more
    # than half of its time (AMX, one core, 1536 x 256: 55 us against 24). In fp32 the plain layout
    # is as fast.
    packable = weight.dtype == torch.bfloat16 and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not (
        packable
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")
