"""Moves blocks between a KV cache and the store of those that it has no room for, and states of
recurrent layers between their places and the same store.

Must not know: requests, hashes, files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...ipc.config import EngineConfig, resolved
from ...ipc.errors import InvalidParameterError, NotEnoughMemoryError
from ..weights.packed_cache import weight_files
from .block_store import BlockStore, StoreError
from .names import ALL, count_to_state, is_block, piece_name

logger = logging.getLogger(__name__)

FORMAT = 1  # changes when kernels write other bits for the same tokens


def identity_of(
    config: EngineConfig, directory: Path | None, cpu_isa: str, shapes: Sequence[Any], version: str
) -> bytes:
    """Returns 32 bytes for all that a block's content depends on beside its tokens: model, weights,
    types, kernels and layout.

    `directory`: of the weights; None: random ones. `shapes`: of each layer's page of a block, and
    of the parts of a state.
    """
    model, device = config.model_config, config.device_config
    weights: list[Any] = ["random", model.seed]
    if directory is not None:
        weights = [
            [str(path.resolve()), (status := path.stat()).st_size, status.st_mtime_ns]
            for path in weight_files(directory)
        ]
    facts = [
        [FORMAT, version, str(torch.__version__), weights, model.hf_config],
        [model.dtype, model.quantization, model.model_impl, config.cache_config.kv_cache_dtype],
        [cpu_isa, device.kernels, config.cache_config.block_size, shapes],
    ]
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).digest()


class KVOffload:
    """Implements BlockOffload (ipc/block_offload.py) for the caches of one rank.

    A state is kept in pieces (names.py), the last of which is filled up. Where blocks have no bytes
    there are states alone, and blocks are always there; where layers keep no states, states are.
    """

    def __init__(
        self,
        store: BlockStore,
        caches: Callable[[], Sequence[torch.Tensor]],
        states: Callable[[], torch.Tensor] | None = None,
        finish_steps: Callable[[], None] = lambda: None,
    ):
        """`caches`: keys and values of each page of a block, [num_blocks, …] and contiguous.
        `states`: the places of states [places, bytes of a place] u8, of a model that keeps any.
        Both are asked for at every move, because a cache that has slept is another one.
        finish_steps: waits until no step runs. One that does may write to blocks and places that
        are to be filled, for a request that has ended, but to none that is stored.
        """
        self.num_stored = self.num_states_stored = 0
        self._store = store
        self._gone: set[bytes] = set()  # names of an earlier store that take_names has told
        self._num_corrupt = 0  # in earlier stores
        self._caches, self._states, self._finish_steps = caches, states, finish_steps
        self._padding = bytearray(store.block_bytes)  # of the last piece of a state

    @property
    def num_blocks(self) -> int:
        return self._store.num_places

    @property
    def num_corrupt(self) -> int:
        return self._num_corrupt + self._store.num_corrupt

    @property
    def block_bytes(self) -> int:
        return self._store.block_bytes

    @property
    def has_blocks(self) -> bool:
        """Whether blocks have bytes."""
        return bool(self._caches())

    @property
    def blocks_per_state(self) -> int:
        """How many pieces a state has; 0: the model keeps no states."""
        if self._states is None:
            return 0
        return -(-self._states().shape[1] // self._store.block_bytes)

    def kept_blocks(self) -> Container[bytes]:
        """The names of the blocks that are kept, until the next call. Those of states are among
        them; no block has such a name.
        """
        return self._store.names() if self.has_blocks else ALL

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Keeps blocks of the cache by these names; the first one leaves first."""
        views = [] if self._store.is_closed else self._views()
        if views:
            pairs = [(name, _rows(views, block)) for block, name in blocks]
            self.num_stored += self._store.write(pairs)

    def load(self, blocks: Sequence[tuple[int, bytes]]) -> bool:
        """Fills blocks of the cache. Returns False if one is not there or is damaged."""
        self._finish_steps()
        views = self._views()
        if not views:
            return True
        pairs = [(name, _rows(views, block)) for block, name in blocks]
        return self._store.read(pairs) == len(pairs)

    def count_to_state(self, names: Sequence[bytes]) -> int:
        """How many names there are up to the last one under which a state is kept; 0: none is."""
        num_pieces = self.blocks_per_state
        return count_to_state(self._store.names(), names, num_pieces) if num_pieces else 0

    def store_states(self, states: Sequence[tuple[int, bytes]]) -> None:
        """Keeps states by these names; the first one leaves first. One that is larger than the
        store is not kept.
        """
        most = self._store.num_places
        if self._states is None or self._store.is_closed or self.blocks_per_state > most:
            return
        for place, name in states:
            self.num_states_stored += self._store.write(self._pieces(place, name)) > 0

    def load_state(self, place: int, name: bytes) -> bool:
        """Fills a place. Returns False if a piece is not there or is damaged."""
        if self._states is None:
            return True
        self._finish_steps()
        pieces = self._pieces(place, name)
        return self._store.read(pieces) == len(pieces)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The names of blocks that have come and gone since the last call; the first time, all."""
        added, removed = self.take_names()
        return [one for one in added if is_block(one)], [one for one in removed if is_block(one)]

    def take_names(self) -> tuple[list[bytes], list[bytes]]:
        """As take_changes, with the names of pieces of states."""
        added, removed = self._store.take_changes()
        gone, self._gone = self._gone - set(added), set()
        return added, [*removed, *gone]

    def remove(self, names: Sequence[bytes]) -> None:
        """Forgets these blocks and states, if they are there."""
        self._store.remove(names)
        if self._states is not None:  # without its first piece a state is not found
            self._store.remove([piece_name(name, 0) for name in names])

    def clear(self) -> None:
        """Forgets all blocks and states, for every engine that uses them."""
        self._store.clear()

    def use_store(self, store: BlockStore) -> None:
        """Takes another store, because the weights have changed."""
        self._gone |= self._store.reported
        self._num_corrupt += self._store.num_corrupt
        self._store.close()
        self._store = store

    def close(self) -> None:
        """May be called twice."""
        self._store.close()

    def _views(self) -> list[tuple[memoryview, int]]:
        """Each cache as bytes, and the bytes of one block in it."""
        views = []
        for cache in self._caches():
            flat = cache.view(torch.uint8).view(-1).numpy().data
            views.append((flat, len(flat) // len(cache)))
        return views

    def _pieces(self, place: int, name: bytes) -> list[tuple[bytes, list[memoryview]]]:
        """The name and the memory of each piece of the state in a place."""
        assert self._states is not None
        state, size = self._states()[place].numpy().data, self._store.block_bytes
        pieces = []
        for index, begin in enumerate(range(0, len(state), size)):
            buffers = [state[begin : begin + size]]
            if missing := size - len(buffers[0]):
                self._padding[:missing] = bytes(missing)  # reading fills it
                buffers.append(memoryview(self._padding)[:missing])
            pieces.append((piece_name(name, index), buffers))
        return pieces


def _rows(views: Sequence[tuple[memoryview, int]], block: int) -> list[memoryview]:
    return [flat[block * size : (block + 1) * size] for flat, size in views]


def open_store(
    config: EngineConfig,
    block_bytes: int,
    identity: bytes,
    free_bytes: int,
    rank: tuple[int, int] = (0, 1),
) -> BlockStore:
    """The store that a configuration asks for. `free_bytes`: of host memory, for this rank; rank:
    its number, and how many there are, which divide kv_offloading_size.

    Raises InvalidParameterError for a file that cannot be used, NotEnoughMemoryError.
    """
    cache, (number, num_ranks) = config.cache_config, rank
    num_bytes, path = int(resolved(cache.kv_offloading_size) * 2**30) // num_ranks, None
    if cache.kv_offloading_path is not None:
        part = f"-{number + 1}of{num_ranks}" if num_ranks > 1 else ""
        path = Path(cache.kv_offloading_path) / f"{identity.hex()[:32]}{part}.kv"
    elif num_bytes > free_bytes:
        raise NotEnoughMemoryError(
            "kv_offloading_size",
            f"{num_bytes} bytes of memory are wanted, {free_bytes} bytes are free; with "
            f"kv_offloading_path blocks are kept in a file",
        )
    try:
        store = BlockStore(
            path,
            num_bytes,
            block_bytes,
            identity,
            tracks_changes=cache.publishes_kv_events or num_ranks > 1,
        )
    except StoreError as error:
        name = "kv_offloading_size" if path is None else "kv_offloading_path"
        raise InvalidParameterError(name, str(error)) from None
    except OSError as error:
        raise InvalidParameterError(
            "kv_offloading_path", f"no file of {num_bytes} bytes can be used at {path}: {error}"
        ) from None
    logger.info(
        "KV offload: room for %d blocks in %s, %d are there",
        store.num_places,
        path or "memory",
        len(store),
    )
    return store
