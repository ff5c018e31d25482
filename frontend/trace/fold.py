"""Folds the kernels of equal layers into one entry, beside this machine's limits.

Must not know: how a trace is shown.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...ipc.trace import Kernel, MachineLimits, StepTrace

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
# the names of operations whose products are of integers
_OF_INTEGERS = re.compile(r"linear_(int|q\d|iq)|quantized|gguf")

# those that compute in fp32 in models of any dtype
_OF_FP32 = re.compile(r"gated_delta_rule|selective_scan")

Key = tuple[str, str, str, str, str]


@dataclass
class FoldedKernel:
    """Kernels of the same operation on the same shape in equal layers."""

    module: str  # with [i] for the index of a layer, as in "layers[i].mlp.down_proj"
    op: str
    implementation: str
    shape: str
    dtype: str
    place: str
    implementation_place: str
    weight_bytes: int  # of one call; of the largest if layers differ
    num_bytes: int  # the same, weights included
    flops: int
    limits: MachineLimits
    seconds: list[float] = field(default_factory=list)  # of each call

    @property
    def key(self) -> Key:
        return self.module, self.op, self.implementation, self.shape, self.dtype

    @property
    def count(self) -> int:
        return len(self.seconds)

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.median_s if self.median_s else 0.0

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.median_s if self.median_s else 0.0

    @property
    def _least_s(self) -> tuple[float, str]:
        """The time that the machine's limits allow, and the limit that applies."""
        limits = self.limits
        peak = limits.flops
        if _OF_INTEGERS.search(f"{self.op} {self.implementation}"):
            peak = limits.int8_ops
        elif _OF_FP32.search(self.op):
            peak = limits.fp32_flops
        memory_s = self.num_bytes / limits.bytes_per_s if limits.bytes_per_s else 0.0
        arithmetic_s = self.flops / peak if peak else 0.0
        return max((memory_s, "memory"), (arithmetic_s, "arithmetic"))

    @property
    def bound(self) -> str:
        """The limit that applies: "memory" or "arithmetic"."""
        return self._least_s[1]

    @property
    def fraction(self) -> float:
        """The share of this limit that the median call reaches. A share above 1 means that its data
        were in a cache.
        """
        return self._least_s[0] / self.median_s if self.median_s else 0.0


def folded_module(module: str) -> str:
    """Turns layers.3.mlp into layers[i].mlp."""
    return _INDEX.sub("[i]", module).replace(".[i]", "[i]")


def fold(kernels: Iterable[Kernel], limits: MachineLimits) -> list[FoldedKernel]:
    """Returns an entry for each operation on a shape, in the order of their first calls."""
    found: dict[Key, FoldedKernel] = {}
    for kernel in kernels:
        module = folded_module(kernel.module)
        key = module, kernel.op, kernel.implementation, kernel.shape, kernel.dtype
        entry = found.get(key)
        if entry is None:
            places = kernel.place, kernel.implementation_place
            entry = found[key] = FoldedKernel(*key, *places, 0, 0, 0, limits)
        entry.seconds.append(kernel.seconds)
        entry.weight_bytes = max(entry.weight_bytes, kernel.weight_bytes)
        entry.num_bytes = max(entry.num_bytes, kernel.weight_bytes + kernel.other_bytes)
        entry.flops = max(entry.flops, kernel.flops)
    return list(found.values())


def kernels_of(step: StepTrace) -> list[Kernel]:
    """Returns the kernels of all ranks."""
    return [kernel for rank in step.ranks for kernel in rank.kernels]


def dominating(kernels: list[FoldedKernel]) -> FoldedKernel | None:
    """Returns the entry that takes most of the time."""
    return max(kernels, key=lambda entry: entry.total_s, default=None)
