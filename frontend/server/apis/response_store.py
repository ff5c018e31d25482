"""Stores responses of /v1/responses, limited by count and by bytes, each visible only to the tenant
that requested it.

Must not know: HTTP, how a response is generated.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

# Of all stored responses, as JSON. A conversation counts in full for each of its responses.
MAX_BYTES = 256 * 2**20


@dataclass(slots=True)
class Stored:
    """`input_items`: the whole conversation before the response, earlier responses included."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]

    def conversation(self) -> list[dict[str, Any]]:
        """The items that precede the next turn."""
        return [*self.input_items, *self.response["output"]]


class ResponseStore:
    """Evicts the oldest responses first.

    With `most` 0 nothing is stored. A response is found only by its own tenant.
    """

    def __init__(self, most: int, max_bytes: int = MAX_BYTES):
        self._most = most
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def keeps(self) -> bool:
        return self._most > 0

    def put(self, tenant: str, stored: Stored) -> None:
        size = len(msgspec.json.encode((stored.response, stored.input_items)))
        self._kept[tenant, stored.response["id"]] = (stored, size)
        self._num_bytes += size
        while len(self._kept) > self._most or self._num_bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._num_bytes -= freed

    def get(self, tenant: str, response_id: str) -> Stored | None:
        found = self._kept.get((tenant, response_id))
        return None if found is None else found[0]

    def pop(self, tenant: str, response_id: str) -> Stored | None:
        found = self._kept.pop((tenant, response_id), None)
        if found is None:
            return None
        self._num_bytes -= found[1]
        return found[0]

    def find_item(self, tenant: str, item_id: str | None) -> dict[str, Any] | None:
        """Finds an item in the tenant's conversations, the latest first: clients refer to items by
        id.
        """
        for (owner, _), (stored, _) in reversed(self._kept.items()):
            if owner == tenant:
                for item in reversed(stored.conversation()):
                    if item["id"] == item_id:
                        return item
        return None
