"""The memory of the states of requests on one rank: recurrent layers keep one of fixed size for
each request.

Must not know: requests, what a place is used for, how much memory there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..ipc.models.state_layout import place_parts
from . import device as devices

if TYPE_CHECKING:
    from .model import StateLayer

Pairs = Sequence[tuple[int, int]]  # (source place, destination place)


class StateMemory:
    """Places for the states of `layers`, which may be replaced by others of the same shape.

    A place has one request's states in all layers, one after another, so that a copy is one move of
    contiguous memory.
    """

    def __init__(self, layers: Sequence[StateLayer], dtype: torch.dtype, device: torch.device):
        """dtype: of the model."""
        self._dtype, self._device = dtype, device
        self._parts = [part for layer in layers for part in layer.state_parts]
        self._offsets, self.place_bytes = place_parts(self._parts, dtype.itemsize)
        self._memory = torch.empty(0, 0, dtype=torch.uint8)  # [places, place_bytes]

    def allocate(self, layers: Sequence[StateLayer], num_places: int) -> None:
        """Allocates zeroed places and binds them to the layers. Pages of a CPU's memory are taken
        when they are written; they are huge, since a step reads a few rows of each layer's part of
        each place.
        """
        shape = num_places, self.place_bytes
        self._memory = devices.zeros(shape, torch.uint8, self._device, huge_pages=True)
        self.bind(layers)

    def bind(self, layers: Sequence[StateLayer]) -> None:
        """Gives the places to the layers, if they are allocated."""
        index, is_allocated = 0, len(self._memory) > 0
        for layer in layers:
            count = len(layer.state_parts)
            views = range(index, index + count) if is_allocated else ()
            layer.bind_states([self._view(i) for i in views])
            index += count

    def _view(self, index: int) -> torch.Tensor:
        """[places, *shape] of a part."""
        part, start = self._parts[index], self._offsets[index]
        end = start + part.num_bytes(self._dtype.itemsize)
        dtype = torch.float32 if part.is_fp32 else self._dtype
        return self._memory[:, start:end].view(dtype).unflatten(1, part.shape)

    @property
    def places(self) -> torch.Tensor:
        """[places, place_bytes] u8, with what is between the parts."""
        return self._memory

    @property
    def shapes(self) -> list[tuple[list[int], bool]]:
        """The shape of each part of a place, and whether it is in fp32."""
        return [(list(part.shape), part.is_fp32) for part in self._parts]

    def release(self, layers: Sequence[StateLayer]) -> None:
        """Frees the places."""
        for layer in layers:
            layer.bind_states([])
        self._memory = torch.empty(0, 0, dtype=torch.uint8)

    def copy(self, pairs: Pairs) -> None:
        """Copies places, in this order."""
        for source, destination in pairs:
            self._memory[destination].copy_(self._memory[source])
