"""What changes in the set of blocks that the prefix cache can find, as events for routers.

Must not know: sockets, who receives the events, which request runs when.
"""

from __future__ import annotations

from itertools import groupby

from msgspec.structs import replace

from ...ipc.block_offload import group_of
from ...ipc.kv_events import (
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    hash_for_routers,
)
from ...ipc.models.kv_layout import KVLayout
from ..request import Request

HASH_BYTES, KEY_BYTES = 32, 34  # of a block's name in the first group, and in the others


class KVEvents:
    """The events since the last `take`, in order. Names are those of KVCacheManager.key_of."""

    def __init__(self, layout: KVLayout):
        self._layout = layout
        self._has_groups = len(layout.windows) > 1
        self._events: list[KVCacheEvent] = [AllBlocksCleared()]  # of an earlier engine
        self._removed: list[int] = []  # blocks of `_removed_group`
        self._removed_group = 0
        self._stored_request: Request | None = None  # whose blocks follow each other
        self._stored_group, self._stored_range = 0, (0, 0)

    def stored(self, request: Request, group: int, index: int) -> None:
        """Block `index` of the request can be found."""
        first, count = self._stored_range
        is_next = self._stored_group == group and index == first + count
        if self._stored_request is not request or not is_next:
            self._flush()
            self._stored_request, self._stored_group, first, count = request, group, index, 0
        self._stored_range = first, count + 1

    def removed(self, name: bytes) -> None:
        """A block can no longer be found."""
        if len(name) > KEY_BYTES:  # the name of a parked block, which was never announced
            return
        group = int.from_bytes(name[HASH_BYTES:])
        if group != self._removed_group or self._stored_request is not None:
            self._flush()
            self._removed_group = group
        self._removed.append(hash_for_routers(name))

    def cleared(self) -> None:
        """No block can be found."""
        self._stored_request, self._removed = None, []
        self._events.append(AllBlocksCleared())

    def changed(self, medium: str, added: list[bytes], removed: list[bytes]) -> None:
        """The blocks of another medium have changed. Both lists hold names (name_in_group); the
        events have no tokens.
        """
        self._flush()
        for group, hashes in self._by_group(removed):
            self._events.append(BlockRemoved(hashes, medium, group))
        for group, hashes in self._by_group(added):
            size = self._layout.block_size
            stored = BlockStored(hashes, None, [], size, None, medium, None)
            self._events.append(stored if group is None else replace(stored, group_idx=group))

    def _by_group(self, names: list[bytes]) -> list[tuple[int | None, list[int]]]:
        """(group, or None where there is one; hashes) of the groups that have any."""
        return [
            (group if self._has_groups else None, [hash_for_routers(name) for name in of_group])
            for group, of_group in groupby(sorted(names, key=group_of), key=group_of)
        ]

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        if self._removed:
            group = self._removed_group if self._has_groups else None
            self._events.append(BlockRemoved(self._removed, GPU, group))
            self._removed = []
        if self._stored_request is not None:
            self._events.append(self._block_stored(self._stored_request))
            self._stored_request = None

    def _block_stored(self, request: Request) -> BlockStored:
        first, count = self._stored_range
        size, hashes = self._layout.block_size, request.block_hashes
        adapter, salt = request.adapter, request.cache_salt
        keys = () if adapter is None else (adapter.name,)
        extra_keys: list[tuple[str, ...] | None] = [keys or None] * count
        if salt is not None and not first:
            extra_keys[0] = (*keys, salt)
        event = BlockStored(
            [hash_for_routers(digest) for digest in hashes[first : first + count]],
            hash_for_routers(hashes[first - 1]) if first else None,
            request.token_ids[first * size : (first + count) * size],
            size,
            None,
            GPU,
            None if adapter is None else adapter.name,
            extra_keys if any(extra_keys) else None,
        )
        window = self._layout.windows[self._stored_group]
        if not self._has_groups and not window:
            return event
        return replace(
            event,
            group_idx=self._stored_group if self._has_groups else None,
            kv_cache_spec_kind="sliding_window" if window else "full_attention",
            kv_cache_spec_sliding_window=window or None,
        )
