"""Moves blocks between a KV cache and the store of those that it has no room for.

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


def identity_of(
    config: EngineConfig, directory: Path | None, cpu_isa: str, shapes: Sequence[Any], version: str
) -> bytes:
    """Returns 32 bytes for all that a block's content depends on beside its tokens: model, weights,
    types, kernels and layout.

    `directory`: of the weights; None: random ones. `shapes`: of each layer's page of a block.
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
    """Implements BlockOffload (ipc/block_offload.py) for the caches of one rank."""

    def __init__(self, store: BlockStore, caches: Callable[[], Sequence[torch.Tensor]]):
        """`caches`: keys and values of each page of a block, [num_blocks, …] and contiguous; asked
        for at every move, because a cache that has slept is another one.
        """
        self._store = store
        self._caches = caches

    @property
    def num_blocks(self) -> int:
        return self._store.num_places

    @property
    def num_corrupt(self) -> int:
        return self._store.num_corrupt

    def count_present(self, names: Sequence[bytes]) -> int:
        """How many names are kept before the first that is not."""
        return self._store.count_present(names)

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        """Keeps blocks of the cache by these names; the first one leaves first. Returns how many
        are new.
        """
        if self._store.is_closed:
            return 0
        views = self._views()
        return self._store.write([(name, _rows(views, block)) for block, name in blocks])

    def load(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        """Fills the first blocks of the cache, up to the first that is not there or is damaged;
        returns their number.
        """
        views = self._views()
        return self._store.read([(name, _rows(views, block)) for block, name in blocks])

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The names that have come and gone since the last call; the first time, all."""
        return self._store.take_changes()

    def remove(self, names: Sequence[bytes]) -> None:
        """Forgets these blocks, if they are there."""
        self._store.remove(names)

    def clear(self) -> None:
        """Forgets all blocks, for every engine that uses them."""
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
