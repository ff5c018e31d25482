"""Stores responses of /v1/responses, limited by count and by bytes, each visible only to the tenant
that requested it.

Must not know: HTTP, how a response is generated.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

logger = logging.getLogger(__name__)
StoredItem = Any  # one of apis/responses_items.py, of which the store reads only the id
# All stored responses together have at most this size, as JSON. A conversation counts in full for
# each of its responses.
MAX_BYTES = 256 * 2**20
ITEM_BYTES = 512  # what an item takes besides its JSON


@dataclass(slots=True)
class Stored:
    """`input_items` are the whole conversation before the response, earlier responses included.

    Nobody changes the items: a conversation and its continuations share them.
    """

    response: dict[str, Any]
    input_items: list[StoredItem]
    output_items: list[StoredItem]

    def conversation(self) -> list[StoredItem]:
        """Returns the items that precede the next turn."""
        return [*self.input_items, *self.output_items]


class SizedItem(NamedTuple):
    """An item of a stored response. `num_bytes` is the length of its JSON."""

    item: StoredItem
    num_bytes: int


class TenantResponses:
    """The stored responses of one tenant, the oldest first, and their items by id."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._responses: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        # Each id of an item has the responses that contain the item, the latest last.
        self._items: dict[str | None, dict[str, SizedItem]] = {}

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, stored: Stored) -> None:
        """Replaces what has the same id."""
        response_id = stored.response["id"]
        num_bytes = len(msgspec.json.encode(stored.response))
        all_kept = [SizedItem(item, self._size(item)) for item in stored.conversation()]
        self.pop(response_id)
        for kept in all_kept:
            self._items.setdefault(kept.item.id, {})[response_id] = kept
            num_bytes += kept.num_bytes + ITEM_BYTES
        self._responses[response_id] = (stored, num_bytes)
        self.num_bytes += num_bytes

    def _size(self, item: StoredItem) -> int:
        """Returns the length of its JSON. An item of an earlier turn is not encoded again."""
        kept = self._latest(item.id)
        if kept is not None and kept.item is item:
            return kept.num_bytes
        return len(msgspec.json.encode(item))

    def get(self, response_id: str) -> Stored | None:
        found = self._responses.get(response_id)
        return None if found is None else found[0]

    def pop(self, response_id: str) -> Stored | None:
        found = self._responses.pop(response_id, None)
        if found is None:
            return None
        stored, num_bytes = found
        for item in stored.conversation():
            if (of_id := self._items.get(item.id)) is not None:
                of_id.pop(response_id, None)
                if not of_id:
                    del self._items[item.id]
        self.num_bytes -= num_bytes
        return stored

    def pop_oldest(self) -> None:
        self.pop(next(iter(self._responses)))

    def find_item(self, item_id: str | None) -> StoredItem | None:
        kept = self._latest(item_id)
        return None if kept is None else kept.item

    def _latest(self, item_id: str | None) -> SizedItem | None:
        of_id = self._items.get(item_id)
        return of_id[next(reversed(of_id))] if of_id else None


class ResponseStore:
    """A response is found only by its own tenant. With `most` 0 nothing is stored.

    Above a limit, the oldest responses are evicted: those of the tenant that stores, if it has more
    than an equal share of the limit, else those of the tenant that has most.
    """

    def __init__(self, most: int, max_bytes: int = MAX_BYTES):
        self._most = most
        self._max_bytes = max_bytes
        self._shelves: dict[str, TenantResponses] = {}  # none of them is empty

    def __len__(self) -> int:
        return sum(map(len, self._shelves.values()))

    @property
    def keeps(self) -> bool:
        return self._most > 0

    def put(self, tenant: str, stored: Stored) -> None:
        shelf = self._shelves.setdefault(tenant, TenantResponses())
        shelf.put(stored)
        while len(self) > self._most:
            self._evict(tenant, {name: len(shelf) for name, shelf in self._shelves.items()})
        while sum(shelf.num_bytes for shelf in self._shelves.values()) > self._max_bytes:
            self._evict(tenant, {name: shelf.num_bytes for name, shelf in self._shelves.items()})
        if self.get(tenant, stored.response["id"]) is None and self.keeps:
            logger.warning(
                "the response %s is too large to be stored: all responses together may have %d "
                "bytes, and each key an equal share",
                stored.response["id"],
                self._max_bytes,
            )

    def _evict(self, tenant: str, sizes: dict[str, int]) -> None:
        """Evicts one response. `sizes` tells how much of the exceeded limit each tenant uses."""
        own = sizes.get(tenant, 0)
        if own * len(sizes) < sum(sizes.values()):
            tenant = max(sizes, key=sizes.__getitem__)
        self._shelves[tenant].pop_oldest()
        if not self._shelves[tenant]:
            del self._shelves[tenant]

    def get(self, tenant: str, response_id: str) -> Stored | None:
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.get(response_id)

    def pop(self, tenant: str, response_id: str) -> Stored | None:
        shelf = self._shelves.get(tenant)
        if shelf is None:
            return None
        stored = shelf.pop(response_id)
        if not shelf:
            del self._shelves[tenant]
        return stored

    def find_item(self, tenant: str, item_id: str | None) -> StoredItem | None:
        """Returns the item with this id in the tenant's conversations. It looks in the latest
        response first: clients refer to items by id.
        """
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.find_item(item_id)
