"""The LoRA adapters of a layer: memory of fixed size, in which each adapter has a place.

Must not know: architectures, files, requests, which adapter is in which place.

Models do not know of them. Addresses never change, so that a recorded program may hold them. Few
adapters have weights for embeddings and heads, so pages for those are allocated when an adapter is
first put there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ...kernels.cpu.native.weights import HugePages
from ...kernels.lora import LORA_BLOCK, first_blocks
from ..weights.lora_files import Adapted, AdapterWeights
from ..weights.table import Part

# Up to this rank the memory is in huge pages, which a step with few rows reads faster, and is
# allocated at once. Higher ranks may be far above those of the adapters.
HUGE_PAGES_RANK = 64


class AdapterRows:
    """Which adapter each row of the running step uses. All layers of a model share one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.adapters: torch.Tensor | None = None  # [T] i32: see add_lora; None: no row has one
        # [R] i64: the rows of the step whose logits are computed; None: all of them
        self.indices: torch.Tensor | None = None
        # while a model is explored: the rows of each call of a layer, by its adapters
        self.seen: dict[LinearAdapters | EmbeddingAdapters, list[int]] | None = None
        self._huge_pages = HugePages()

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for A or B of most adapters in all places; shape[-2] is the top rank."""
        if self.device.type != "cpu" or shape[-2] > HUGE_PAGES_RANK:
            return torch.zeros(*shape, dtype=dtype, device=self.device)
        memory = self._huge_pages.empty(*shape, dtype=dtype)
        memory.view(-1)[:: mmap.PAGESIZE // dtype.itemsize] = 0.0
        return memory

    @contextmanager
    def watched(self) -> Iterator[dict[LinearAdapters | EmbeddingAdapters, list[int]]]:
        """A context that yields `seen` of its passes, in which adapters add nothing."""
        self.seen = {}
        try:
            yield self.seen
        finally:
            self.seen = None

    def begin(self, adapters: torch.Tensor | None, logits_indices: torch.Tensor) -> None:
        """Sets the rows of a step. Call it before each step. adapters [T], logits_indices [R]."""
        self.adapters = adapters
        is_each = adapters is not None and len(logits_indices) == len(adapters)
        self.indices = None if is_each else logits_indices

    def use_one(self, place: int, count: int) -> None:
        """Prepares logits of `count` rows outside of a step, all with the adapter of this place."""
        self.adapters = torch.full((count,), place, dtype=torch.int32, device=self.device)
        self.indices = None


class LinearAdapters:
    """The adapters of a linear layer, which may consist of merged projections."""

    def __init__(
        self,
        ops: Any,
        rows: AdapterRows,
        max_loras: int,
        max_rank: int,
        in_features: int,
        slices: list[int],
        dtype: torch.dtype,
        is_common: bool = True,
        parts: Sequence[Part | None] = (),
    ):
        """in_features and slices, the outputs of each projection, are those of this rank, and
        `parts` what it keeps of each projection's weight, if not all. is_common: whether most
        adapters have weights here.
        """
        self.add_lora = ops.add_lora
        self.rows = rows
        self.slices = slices
        self._parts = parts or [None] * len(slices)
        self._first = first_blocks(slices)
        device = rows.device
        shape = max_loras, len(slices)
        zeros = rows.zeros if is_common else partial(torch.zeros, device=device)
        self.a = zeros(*shape, max_rank, in_features, dtype=dtype)
        self.b = zeros(max_loras, self._first[-1], max_rank, LORA_BLOCK, dtype=dtype)
        self.scales = torch.zeros(shape, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self._all = [_Writable(x) for x in (self.a, self.b, self.scales, self.ranks)]

    def add(self, y: torch.Tensor, x: torch.Tensor, *, is_logits: bool = False) -> None:
        """In place: y [T, sum of slices] += the adapters' part; x [T, in_features]."""
        rows = self.rows
        if rows.seen is not None:
            rows.seen.setdefault(self, []).append(len(x))
        elif rows.adapters is not None:
            indices = rows.indices if is_logits else None
            self.add_lora(
                y,
                x,
                self.a,
                self.b,
                self.scales,
                self.ranks,
                rows.adapters,
                indices,
                self.slices,
            )

    def adapted(self, index: int) -> Adapted:
        part = self._parts[index]
        own = torch.empty(self.slices[index], self.a.shape[-1], device="meta")
        outputs, inputs = own.shape if part is None else part.stored_shape(own)
        return Adapted(inputs, outputs, part=part)

    def put(self, place: int, index: int, weights: AdapterWeights) -> None:
        """Puts the adapter of projection `index` into a place, which has been cleared."""
        first, end = self._first[index : index + 2]
        a, b, scales, ranks = self._all
        a[place, index, : weights.rank] = weights.a
        b[place, first:end, : weights.rank] = weights.b
        scales[place, index], ranks[place, index] = weights.scale, weights.rank

    def clear(self, place: int) -> None:
        self._all[3][place] = 0


class _Writable:
    """Writes parts of a tensor. On CPUs it uses NumPy, which needs one thread and less time for a
    call than torch: this happens between two steps.
    """

    def __init__(self, tensor: torch.Tensor):
        self._is_on_cpu = tensor.device.type == "cpu"
        self._target: Any = _as_numpy(tensor) if self._is_on_cpu else tensor

    def __setitem__(self, key: Any, value: torch.Tensor | float) -> None:
        if self._is_on_cpu and isinstance(value, torch.Tensor):
            self._target[key] = _as_numpy(value)
        else:
            self._target[key] = value


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Returns an array in the same memory, of i2 for bf16, which NumPy lacks."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class EmbeddingAdapters:
    """The adapters of an embedding."""

    def __init__(
        self,
        ops: Any,
        rows: AdapterRows,
        max_loras: int,
        max_rank: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ):
        """shape: [vocab_size, hidden_size]"""
        self.add_lora_embedding = ops.add_lora_embedding
        self.rows = rows
        device = rows.device
        self.a = torch.zeros(max_loras, shape[0], max_rank, dtype=dtype, device=device)
        self.hidden_size = shape[1]
        b_shape = max_loras, first_blocks([shape[1]])[-1], max_rank, LORA_BLOCK
        self.b = torch.zeros(b_shape, dtype=dtype, device=device)
        self.scales = torch.zeros(max_loras, 1, device=device)
        self.ranks = torch.zeros(max_loras, 1, dtype=torch.int32, device=device)

    def add(self, y: torch.Tensor, token_ids: torch.Tensor) -> None:
        """In place: y [T, hidden_size] += the adapters' part; token_ids [T]."""
        rows, adapters = self.rows, self.rows.adapters
        if rows.seen is not None:
            rows.seen.setdefault(self, []).append(len(token_ids))
        elif adapters is not None:
            self.add_lora_embedding(y, token_ids, self.a, self.b, self.scales, self.ranks, adapters)

    def adapted(self, index: int) -> Adapted:
        return Adapted(self.a.shape[1], self.hidden_size, is_embedding=True)

    def put(self, place: int, index: int, weights: AdapterWeights) -> None:
        """Puts the embedding's adapter into a place, which has been cleared."""
        self.a[place, :, : weights.rank] = weights.a
        self.b[place, :, : weights.rank] = weights.b
        self.scales[place], self.ranks[place] = weights.scale, weights.rank

    def clear(self, place: int) -> None:
        self.ranks[place] = 0


# name of a module -> the adapters of its layer, and its index among the merged projections
Modules = dict[str, tuple[LinearAdapters | EmbeddingAdapters, int]]
