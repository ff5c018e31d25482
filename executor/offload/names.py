"""Under which names a rank keeps the pieces of a state, and where the deepest state is.

Must not know: torch, what a state holds, where pieces are kept.

A state is as large as many blocks, or smaller than one. So it is kept in pieces of the size of a
block, in the same places, under names of their own.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

STATE_MARK = b"state"  # no hash begins with it


class _All:
    def __contains__(self, name: object) -> bool:
        return True


ALL: Container[bytes] = _All()  # where blocks have no bytes, they are always there


def piece_name(name: bytes, index: int) -> bytes:
    """The name of a piece of the state after the block `name`. It has 24 bytes of the block's."""
    return STATE_MARK + index.to_bytes(3) + name[len(STATE_MARK) + 3 :]


def is_block(name: bytes) -> bool:
    """Whether it names a block."""
    return not name.startswith(STATE_MARK)


def has_state(kept: Container[bytes], name: bytes, num_pieces: int) -> bool:
    """Whether all pieces of a state are there. Pieces leave in their order: where the first one is
    there, the others almost always are.
    """
    return all(piece_name(name, index) in kept for index in range(num_pieces))


def count_to_state(kept: Container[bytes], names: Sequence[bytes], num_pieces: int) -> int:
    """How many names there are up to the last one under which a state is kept; 0: none is."""
    counts = range(len(names), 0, -1)
    return next((i for i in counts if has_state(kept, names[i - 1], num_pieces)), 0)
