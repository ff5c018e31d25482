"""The interface through which the engine core keeps blocks outside the KV cache.

Must not know: where they are kept, what a block holds, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockOffload(Protocol):
    """Keeps blocks of the KV cache that the cache has no room for, by names of 32 bytes. Blocks
    with the same name are equal, regardless of which engine computed them.

    Called between two steps, and while no step is in flight. What it keeps may leave at any time,
    and may be there from an earlier engine, or come from another one.
    """

    @property
    def num_blocks(self) -> int:
        """Most blocks that are kept."""
        ...

    @property
    def num_corrupt(self) -> int:
        """Blocks that were found to be damaged; a counter."""
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

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """The names that were added and removed since the last call; all of them the first
        time. Empty without kv_events_config.
        """
        ...

    def remove(self, names: Sequence[bytes]) -> None:
        """Forgets these blocks, if they are there."""
        ...

    def clear(self) -> None:
        """Forgets all blocks."""
        ...
