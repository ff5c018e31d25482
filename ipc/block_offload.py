"""The interface through which the engine core keeps blocks outside the KV cache, and states of
recurrent layers beside them.

Must not know: where they are kept, what a block or a state holds, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockOffload(Protocol):
    """Keeps blocks of the KV cache that the cache has no room for, by names of 32 bytes. Blocks
    with the same name are equal, regardless of which engine computed them. A state after a block
    has the block's name; the two are kept, and lost, apart from each other.

    Called between two steps, and while no step is in flight. What it keeps may leave at any time,
    and may be there from an earlier engine, or come from another one.
    """

    @property
    def num_blocks(self) -> int:
        """Most blocks that are kept."""
        ...

    @property
    def num_corrupt(self) -> int:
        """Blocks and parts of states that were found to be damaged; a counter."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes that a kept block takes."""
        ...

    @property
    def blocks_per_state(self) -> int:
        """How many blocks a kept state takes the room of; 0: the model keeps no states."""
        ...

    def count_present(self, names: Sequence[bytes]) -> int:
        """How many of the first names are kept, up to the first that is not."""
        ...

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        """Keeps blocks of the cache (block id, name); of these the first one leaves first. Returns
        how many are new.
        """
        ...

    def load(self, blocks: Sequence[tuple[int, bytes]]) -> int:
        """Fills blocks of the cache (block id, name), up to the first that cannot be loaded;
        returns their number. What the other blocks hold is not defined.
        """
        ...

    def count_to_state(self, names: Sequence[bytes]) -> int:
        """How many names there are up to the last one under which a state is kept; 0: there is
        none.
        """
        ...

    def store_states(self, states: Sequence[tuple[int, bytes]]) -> int:
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
        """Forgets these blocks and states, if they are there."""
        ...

    def clear(self) -> None:
        """Forgets all blocks and states."""
        ...
