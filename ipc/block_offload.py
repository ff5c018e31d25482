"""The interface through which the engine core keeps blocks outside the KV cache, and states of
recurrent layers beside them.

Must not know: where they are kept, what a block or a state holds, requests.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .models.kv_layout import KVLayout

GROUP_MARK = b"group"  # no hash begins with it


def name_in_group(digest: bytes, group: int) -> bytes:
    """The name of the block with this hash [32 bytes] that belongs to a group of layers (see
    ipc/models/kv_layout.py). In all groups but the first one it has 24 bytes of the hash.
    """
    if not group:
        return digest
    return GROUP_MARK + group.to_bytes(3) + digest[len(GROUP_MARK) + 3 :]


def group_of(name: bytes) -> int:
    """The group in whose blocks the name was given."""
    mark = len(GROUP_MARK)
    return int.from_bytes(name[mark : mark + 3]) if name.startswith(GROUP_MARK) else 0


class Beginning(NamedTuple):
    """The full blocks with which a prompt begins, all but those with its last token."""

    layout: KVLayout
    digests: Sequence[bytes]  # their hashes, 32 bytes each
    cached: Collection[bytes]  # names of those that the cache has
    num_to_state: int = 0  # blocks before the deepest state that a checkpoint has


@dataclass(slots=True)
class Transfers:
    """What went between engines; counters. Threads other than the engine's write them."""

    num_blocks_pulled: int = 0
    num_bytes_pulled: int = 0
    num_pulls_failed: int = 0  # prompts for which no engine sent all that it has
    num_blocks_sent: int = 0
    num_bytes_sent: int = 0


class BlockOffload(Protocol):
    """Keeps blocks of the KV cache that the cache has no room for, by names of 32 bytes (see
    name_in_group). Blocks with the same name are equal, regardless of which engine computed them. A
    state after a block of the first group has the block's name; the two are kept, and lost, apart
    from each other.

    Called between two steps. What it does comes after the steps that were begun before, and ahead
    of those that are begun later. What it keeps may leave at any time, and may be there from an
    earlier engine, or come from another one.
    """

    @property
    def num_blocks(self) -> int:
        """Most blocks that are kept."""
        ...

    @property
    def num_stored(self) -> int:
        """Blocks that were stored and were not there before; a counter, as the next two."""
        ...

    @property
    def num_states_stored(self) -> int:
        """Such states."""
        ...

    @property
    def num_corrupt(self) -> int:
        """Blocks and parts of states that were found to be damaged."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes that a kept block takes."""
        ...

    @property
    def blocks_per_state(self) -> int:
        """How many blocks a kept state takes the room of; 0: the model keeps no states."""
        ...

    @property
    def transfers(self) -> Transfers:
        """Of blocks, and of the pieces of states."""
        ...

    def fetch(self, beginning: Beginning) -> Future[None] | None:
        """Begins to bring what other engines have of a prompt and this one has not, so that it is
        kept here. The future has its result, in another thread, when that is done or has failed, at
        the latest after kv_transfer_config's timeout_s; it never raises. It can be cancelled: then
        no more is brought. None: there is nothing to wait for.
        """
        ...

    def kept_blocks(self) -> Container[bytes]:
        """The names of the blocks that are kept, for a look at it before the next call."""
        ...

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Keeps blocks of the cache (block id, name); of these the first one leaves first. Where
        the caller does not wait for steps, they may count as kept a little later.
        """
        ...

    def load(self, blocks: Sequence[tuple[int, bytes]]) -> bool:
        """Fills blocks of the cache (block id, name). Returns False if one cannot be loaded; what
        the blocks hold is not defined then.
        """
        ...

    def touch(self, names: Sequence[bytes]) -> None:
        """Those of these blocks that are kept were used just now; of these the first one leaves
        first.
        """
        ...

    def count_to_state(self, names: Sequence[bytes]) -> int:
        """How many names there are up to the last one under which a state is kept; 0: there is
        none.
        """
        ...

    def store_states(self, states: Sequence[tuple[int, bytes]]) -> None:
        """Keeps states (place, name) as `store` keeps blocks."""
        ...

    def load_state(self, place: int, name: bytes) -> bool:
        """Fills a place. Returns False if the state cannot be loaded; what the place holds is not
        defined then.
        """
        ...

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The names of blocks that were added and removed since the last call; all of them the
        first time. Empty without kv_events_config.
        """
        ...

    def remove(self, names: Sequence[bytes]) -> None:
        """Forgets these blocks and states, if they are there. They are not trusted: other engines
        are not asked for them.
        """
        ...

    def clear(self) -> None:
        """Forgets all blocks and states."""
        ...
