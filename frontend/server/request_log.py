"""RequestLog: summaries of recent finished requests, for later queries.

Must not know: prompts or responses (none is stored), HTTP, the clients.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ..outputs import RequestMetrics

MAX_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One entry.

    `summary` is what the HTTP layer knows about it (model, finish_reason, ...), as returned by the
    API.
    """

    request_id: str
    metrics: RequestMetrics
    summary: dict[str, Any]


class RequestLog:
    """The last `capacity` finished requests by id; the oldest is evicted first."""

    def __init__(self, capacity: int = MAX_REQUESTS):
        self._capacity = capacity
        self._requests: dict[str, FinishedRequest] = {}  # the latest last

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, metrics: RequestMetrics, summary: dict[str, Any]) -> None:
        """Adds a finished request.

        A repeated id replaces the earlier entry: clients may choose ids.
        """
        if metrics.token_ts:  # at most 4096 tokens, 32 KiB: a quarter of the log's memory
            metrics = replace(metrics, token_ts=array("d", metrics.token_ts))
        self._requests.pop(request_id, None)
        self._requests[request_id] = FinishedRequest(request_id, metrics, summary)
        if len(self._requests) > self._capacity:
            del self._requests[next(iter(self._requests))]

    def get(self, request_id: str) -> FinishedRequest | None:
        """Finds a request by the id in the response body, or by x-request-id. Of several prompts in
        one call, it finds the last to finish.
        """
        if request_id in self._requests:
            return self._requests[request_id]
        newest = reversed(self._requests.values())
        return next(
            (request for request in newest if request.summary.get("x_request_id") == request_id),
            None,
        )

    def recent(self, limit: int) -> list[FinishedRequest]:
        """Returns the last `limit` requests, latest first."""
        return list(islice(reversed(self._requests.values()), limit))
