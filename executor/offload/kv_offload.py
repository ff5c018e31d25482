"""Moves blocks between a KV cache and the store of those that it has no room for, and states of
recurrent layers between their places and the same store.

Must not know: requests, hashes, files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...ipc.config import EngineConfig, resolved
from ...ipc.errors import InvalidParameterError, NotEnoughMemoryError
from ..weights.packed_cache import weight_files
from .block_store import BlockStore, StoreError

logger = logging.getLogger(__name__)

FORMAT = 1  # changes when kernels write other bits for the same tokens
STATE_MARK = b"state"


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

    A state is as large as many blocks, or smaller than one. So it is kept in pieces of the size of
    a block, the last of which is filled up, in the same places, under names of their own. A model
    whose blocks have no bytes has states alone: its blocks are always there.
    """

    def __init__(
        self,
        store: BlockStore,
        caches: Callable[[], Sequence[torch.Tensor]],
        states: Callable[[], torch.Tensor] | None = None,
    ):
        """`caches`: keys and values of each page of a block, [num_blocks, …] and contiguous.
        `states`: the places of states [places, bytes of a place] u8, of a model that keeps any.
        Both are asked for at every move, because a cache that has slept is another one.
        """
        self._store = store
        self._caches, self._states = caches, states
        self._padding = bytearray(store.block_bytes)  # of the last piece of a state

    @property
    def num_blocks(self) -> int:
        return self._store.num_places

    @property
    def num_corrupt(self) -> int:
        return self._store.num_corrupt

    @property
    def block_bytes(self) -> int:
        return self._store.block_bytes

    @property
    def blocks_per_state(self) -> int:
        """How many pieces a state has; 0: the model keeps no states."""
        if self._states is None:
            return 0
        return -(-self._states().shape[1] // self._store.block_bytes)

    def count_present(self, names: Sequence[bytes]) -> int:
        """How many names are kept before the first that is not."""
        return self._store.count_present(names) if self._caches() else len(names)

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        """Keeps blocks of the cache by these names; the first one leaves first. Returns how many
        are new.
        """
        views = [] if self._store.is_closed else self._views()
        if not views:
            return 0
        return self._store.write([(name, _rows(views, block)) for block, name in blocks])

    def load(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        """Fills the first blocks of the cache, up to the first that is not there or is damaged;
        returns their number.
        """
        views = self._views()
        if not views:
            return len(blocks)
        return self._store.read([(name, _rows(views, block)) for block, name in blocks])

    def count_to_state(self, names: Sequence[bytes]) -> int:
        """How many names there are up to the last one under which a state is kept; 0: none is.
        Pieces leave in their order: where the first one is there, the others almost always are.
        """
        if self._states is None:
            return 0
        count, num_pieces = len(names), self.blocks_per_state
        while count := self._store.count_to_last([piece_name(name, 0) for name in names[:count]]):
            pieces = [piece_name(names[count - 1], i) for i in range(num_pieces)]
            if self._store.count_present(pieces) == num_pieces:
                break
            count -= 1
        return count

    def store_states(self, states: Sequence[tuple[int, bytes]]) -> int:
        """Keeps states by these names; the first one leaves first. Returns how many are new. One
        that is larger than the store is not kept.
        """
        if self._store.is_closed or self.blocks_per_state > self._store.num_places:
            return 0
        num_new = 0
        for place, name in states:
            num_new += self._store.write(self._pieces(place, name)) > 0
        return num_new

    def load_state(self, place: int, name: bytes) -> bool:
        """Fills a place. Returns False if a piece is not there or is damaged."""
        pieces = self._pieces(place, name)
        return self._store.read(pieces) == len(pieces)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The names of blocks that have come and gone since the last call; the first time, all."""
        added, removed = self._store.take_changes()
        return [one for one in added if is_block(one)], [one for one in removed if is_block(one)]

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


def piece_name(name: bytes, index: int) -> bytes:
    """The name of a piece of the state after the block `name`. It has 24 bytes of the block's."""
    return STATE_MARK + index.to_bytes(3) + name[len(STATE_MARK) + 3 :]


def is_block(name: bytes) -> bool:
    """Whether it names a block: no hash begins with the mark."""
    return not name.startswith(STATE_MARK)


def _rows(views: Sequence[tuple[memoryview, int]], block: int) -> list[memoryview]:
    return [flat[block * size : (block + 1) * size] for flat, size in views]


def open_store(
    config: EngineConfig, block_bytes: int, identity: bytes, free_bytes: int
) -> BlockStore:
    """The store that a configuration asks for; `free_bytes`: of host memory.

    Raises InvalidParameterError for a file that cannot be used, NotEnoughMemoryError.
    """
    cache = config.cache_config
    num_bytes, path = int(resolved(cache.kv_offloading_size) * 2**30), None
    if cache.kv_offloading_path is not None:
        path = Path(cache.kv_offloading_path) / f"{identity.hex()[:32]}.kv"
    elif num_bytes > free_bytes:
        raise NotEnoughMemoryError(
            "kv_offloading_size",
            f"{num_bytes} bytes of memory are wanted, {free_bytes} bytes are free; with "
            f"kv_offloading_path blocks are kept in a file",
        )
    try:
        store = BlockStore(
            path, num_bytes, block_bytes, identity, tracks_changes=cache.publishes_kv_events
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
