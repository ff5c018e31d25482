"""Where blocks and states are in memory: read and written in place on a CPU, through pinned memory
of the host on a GPU.

Must not know: the store, names, requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..device import host_zeros, synchronize

# They are asked for at every move, because a cache that has slept is another one.
Caches = Callable[
    [], Sequence[torch.Tensor]
]  # of each page of a block: [num_blocks, …], contiguous
States = Callable[[], torch.Tensor]  # [places, bytes of a place] u8
Rows = list[list[memoryview]]  # of each block, the bytes of its pages

STAGED_BLOCKS = 16


class BlockMemory(Protocol):
    """What is returned holds, or takes, the bytes until the next call."""

    most_at_once: int  # blocks of one call

    @property
    def has_blocks(self) -> bool:
        """Whether blocks have bytes."""
        ...

    @property
    def state_bytes(self) -> int:
        """Of one place; 0: the model keeps no states."""
        ...

    def fetch(self, blocks: Sequence[int]) -> Rows:
        """The bytes of blocks."""
        ...

    def room(self, blocks: Sequence[int]) -> Rows:
        """Memory for the bytes of blocks, which `put` then gives them."""
        ...

    def put(self, blocks: Sequence[int]) -> None: ...

    def fetch_state(self, place: int) -> memoryview:
        """The bytes of the state in a place."""
        ...

    def state_room(self, place: int) -> memoryview:
        """Memory for the bytes of a state, which `put_state` then gives the place."""
        ...

    def put_state(self, place: int) -> None: ...


class HostMemory:
    """Blocks and states where they are. states: of a model that keeps any."""

    most_at_once = sys.maxsize

    def __init__(self, caches: Caches, states: States | None = None):
        self._caches, self._states = caches, states

    @property
    def has_blocks(self) -> bool:
        return bool(self._caches())

    @property
    def state_bytes(self) -> int:
        return 0 if self._states is None else self._states().shape[1]

    def fetch(self, blocks: Sequence[int]) -> Rows:
        return _rows(self._caches(), blocks)

    def room(self, blocks: Sequence[int]) -> Rows:
        return _rows(self._caches(), blocks)

    def put(self, blocks: Sequence[int]) -> None:
        """They are there already."""

    def fetch_state(self, place: int) -> memoryview:
        assert self._states is not None
        return self._states()[place].numpy().data

    def state_room(self, place: int) -> memoryview:
        return self.fetch_state(place)

    def put_state(self, place: int) -> None:
        """It is there already."""


class DeviceMemory:
    """Blocks and states of a GPU. What is launched on its stream before a copy has run by then."""

    most_at_once = STAGED_BLOCKS

    def __init__(
        self,
        caches: Caches,
        states: States | None,
        host_caches: Sequence[torch.Tensor],
        copy_blocks: Callable[..., None],
        device: torch.device,
    ):
        """host_caches: pinned, of STAGED_BLOCKS blocks, in the order of the caches."""
        self._caches, self._states, self._host_caches = caches, states, list(host_caches)
        self._copy_blocks, self._device = copy_blocks, device
        self._host_state = host_zeros((self.state_bytes,), torch.uint8, device)

    @property
    def has_blocks(self) -> bool:
        return bool(self._host_caches)

    @property
    def state_bytes(self) -> int:
        return 0 if self._states is None else self._states().shape[1]

    def fetch(self, blocks: Sequence[int]) -> Rows:
        self._copy(self._caches(), self._host_caches, list(zip(blocks, range(len(blocks)))))
        return self.room(blocks)

    def room(self, blocks: Sequence[int]) -> Rows:
        return _rows(self._host_caches, range(len(blocks)))

    def put(self, blocks: Sequence[int]) -> None:
        self._copy(self._host_caches, self._caches(), list(zip(range(len(blocks)), blocks)))

    def _copy(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        pairs: list[tuple[int, int]],
    ) -> None:
        self._copy_blocks(list(sources), list(destinations), torch.tensor(pairs))
        synchronize(self._device)  # the memory of the host is used next

    def fetch_state(self, place: int) -> memoryview:
        assert self._states is not None
        self._host_state.copy_(self._states()[place])
        return self.state_room(place)

    def state_room(self, place: int) -> memoryview:
        return self._host_state.numpy().data

    def put_state(self, place: int) -> None:
        assert self._states is not None
        self._states()[place].copy_(self._host_state)


def _rows(caches: Sequence[torch.Tensor], blocks: Sequence[int]) -> Rows:
    views = []
    for cache in caches:
        flat = cache.view(torch.uint8).view(-1).numpy().data
        views.append((flat, len(flat) // len(cache)))
    return [[flat[block * size : (block + 1) * size] for flat, size in views] for block in blocks]
