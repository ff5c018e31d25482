"""Moves blocks between a KV cache and the store of those that it has no room for, and states of
recurrent layers between their places and the same store.

Must not know: requests, hashes, files.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from ...ipc.block_offload import Beginning, Transfers
from ...ipc.config import EngineConfig, resolved
from ...ipc.errors import InvalidParameterError, NotEnoughMemoryError
from ...ipc.kv_transfer import KVShare, KVTransferConfig
from ..weights.packed_cache import weight_files
from .block_memory import BlockMemory
from .block_store import BlockStore, StoreError
from .names import ALL, count_to_state, is_block, piece_name
from .peers import BlockPuller, BlockSender

logger = logging.getLogger(__name__)

T = TypeVar("T")
# what computes blocks: kernels, what calls them, and what the files of a model mean
CODE = ("kernels", "executor", "ipc/models")
CODE_SUFFIXES = frozenset({".py", ".h", ".inl", ".cpp"})


@functools.cache
def code_digest() -> str:
    """Changes where the code may write other bits for the same tokens."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for folder in CODE:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in CODE_SUFFIXES:
                digest.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def identity_of(
    config: EngineConfig,
    directory: Path | None,
    computed_by: str,
    shapes: Sequence[Any],
    version: str,
) -> bytes:
    """Returns 32 bytes for all that a block's content depends on beside its tokens: model, weights,
    types, kernels and layout.

    `directory`: of the weights; None: random ones. computed_by: the instruction set, or the GPU,
    and the kernels that were chosen.
    `shapes`: of each layer's page of a block, and of the parts of a state.
    """
    model, device = config.model_config, config.device_config
    weights: list[Any] = ["random", model.seed]
    if directory is not None:
        weights = [
            [str(path.resolve()), (status := path.stat()).st_size, status.st_mtime_ns]
            for path in weight_files(directory)
        ]
    facts = [
        [code_digest(), version, str(torch.__version__), weights, model.hf_config],
        [model.dtype, model.quantization, model.model_impl, config.cache_config.kv_cache_dtype],
        [computed_by, device.kernels, config.cache_config.block_size, shapes],
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
        memory: BlockMemory,
        finish_steps: Callable[[], None] = lambda: None,
        transfer: KVTransferConfig | None = None,
        share: KVShare = KVShare(),
    ):
        """memory: of blocks and states. transfer: with which engines the store is shared, with the
        addresses of this rank. share: of each block, which this rank has.
        finish_steps: waits until no step runs. One that does may write to blocks and places that
        are to be filled, for a request that has ended, but to none that is stored.
        """
        self.num_stored = self.num_states_stored = 0
        self._store = store
        self._gone: set[bytes] = set()  # names of an earlier store that take_names has told
        self._num_corrupt = 0  # in earlier stores
        self._memory, self._finish_steps = memory, finish_steps
        self._padding = bytearray(store.block_bytes)  # of the last piece of a state
        self.transfers = Transfers()
        self._reported = Transfers()  # by take_transfers
        self._sender, self._puller = None, None
        if transfer is not None and transfer.sends:
            self._sender = BlockSender(transfer, lambda: self._store, self.transfers, share)
        if transfer is not None and transfer.receives and transfer.peers:
            self._puller = BlockPuller(
                transfer,
                lambda: self._store,
                self.transfers,
                self.blocks_per_state,
                share,
                has_blocks=self.has_blocks,
            )

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
        return self._memory.has_blocks

    @property
    def blocks_per_state(self) -> int:
        """How many pieces a state has; 0: the model keeps no states."""
        return -(-self._memory.state_bytes // self._store.block_bytes)

    def fetch(self, beginning: Beginning) -> Future[None] | None:
        """See BlockOffload."""
        return None if self._puller is None else self._puller.fetch(beginning)

    def kept_blocks(self) -> Container[bytes]:
        """The names of the blocks that are kept, until the next call. Those of states are among
        them; no block has such a name.
        """
        return self._store.names() if self.has_blocks else ALL

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Keeps blocks of the cache by these names; the first one leaves first."""
        if self._store.is_closed or not self._memory.has_blocks:
            return
        for part, names in self._parts(blocks):
            self.num_stored += self._store.write([*zip(names, self._memory.fetch(part))])

    def load(self, blocks: Sequence[tuple[int, bytes]]) -> bool:
        """Fills blocks of the cache. Returns False if one is not there or is damaged."""
        self._finish_steps()
        memory = self._memory
        for part, names in self._parts(blocks) if memory.has_blocks else ():
            pairs = [*zip(names, memory.room(part))]
            count = self._store.read(pairs)
            memory.put(part[:count])
            if count < len(pairs):
                return False
        # a beginning is of use without its end
        self._store.touch([name for _, name in reversed(blocks)])
        return True

    def touch(self, names: Sequence[bytes]) -> None:
        """Those of these blocks that are kept are used now; the first one leaves first."""
        self._store.touch(names)

    def _parts(
        self, blocks: Sequence[tuple[int, bytes]]
    ) -> Iterator[tuple[list[int], list[bytes]]]:
        """Blocks and their names, as many as can be moved at once."""
        for some in batched(blocks, min(self._memory.most_at_once, max(1, len(blocks)))):
            yield [block for block, _ in some], [name for _, name in some]

    def count_to_state(self, names: Sequence[bytes]) -> int:
        """How many names there are up to the last one under which a state is kept; 0: none is."""
        num_pieces = self.blocks_per_state
        return count_to_state(self._store.names(), names, num_pieces) if num_pieces else 0

    def store_states(self, states: Sequence[tuple[int, bytes]]) -> None:
        """Keeps states by these names; the first one leaves first. One that is larger than the
        store is not kept.
        """
        most = self._store.num_places
        num_pieces = self.blocks_per_state
        if not num_pieces or self._store.is_closed or num_pieces > most:
            return
        for place, name in states:
            pieces = self._pieces(self._memory.fetch_state(place), name)
            self.num_states_stored += self._store.write(pieces) > 0

    def load_state(self, place: int, name: bytes) -> bool:
        """Fills a place. Returns False if a piece is not there or is damaged."""
        if not self._memory.state_bytes:
            return True
        self._finish_steps()
        pieces = self._pieces(self._memory.state_room(place), name)
        is_there = self._store.read(pieces) == len(pieces)
        if is_there:
            self._memory.put_state(place)
            self._store.touch([piece for piece, _ in pieces])
        return is_there

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The names of blocks that have come and gone since the last call; the first time, all."""
        added, removed = self.take_names()
        return [one for one in added if is_block(one)], [one for one in removed if is_block(one)]

    def take_names(self) -> tuple[list[bytes], list[bytes]]:
        """As take_changes, with the names of pieces of states."""
        added, removed = self._store.take_changes()
        gone, self._gone = self._gone - set(added), set()
        return added, [*removed, *gone]

    def take_transfers(self) -> Transfers | None:
        """What went between engines since the start; None: nothing since the last call."""
        transfers = dataclasses.replace(self.transfers)
        if transfers == self._reported:
            return None
        self._reported = transfers
        return transfers

    def remove(self, names: Sequence[bytes]) -> None:
        """Forgets these blocks and states, if they are there. Other engines are not asked for them
        again.
        """
        lost = list(names)
        if self._memory.state_bytes:  # without its first piece a state is not found
            lost += [piece_name(name, 0) for name in names]
        if self._puller is None:
            self._store.remove(lost)
        else:
            self._puller.remove(lost)

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
        for link in (self._sender, self._puller):
            if link is not None:
                link.close()
        self._store.close()

    def _pieces(self, state: memoryview, name: bytes) -> list[tuple[bytes, list[memoryview]]]:
        """The name and the memory of each piece of a state."""
        size = self._store.block_bytes
        pieces = []
        for index, begin in enumerate(range(0, len(state), size)):
            buffers = [state[begin : begin + size]]
            if missing := size - len(buffers[0]):
                self._padding[:missing] = bytes(missing)  # reading fills it
                buffers.append(memoryview(self._padding)[:missing])
            pieces.append((piece_name(name, index), buffers))
        return pieces


def batched(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), count):
        yield items[begin : begin + count]


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
