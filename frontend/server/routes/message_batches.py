"""/v1/messages/batches: Anthropic's batches of messages.

Must not know: how a batch is run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ...batches.input_file import LineError
from ...batches.store import StoredBatch
from ..http.call import call_of
from ..http.errors import ApiError, invalid, not_found
from ..http.openapi import LINES, ApiRoute
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..state import ServerState
from ..stored import on_disk, page_of, store_of

MAX_REQUESTS = 100_000  # Anthropic's limit
MAX_LISTED, LISTED = 1000, 20  # Anthropic's limits
EXPIRES_S = 24 * 3600
URL = "/v1/messages"


class MessageRequest(msgspec.Struct):
    """One request of a batch. `params` is a body of /v1/messages."""

    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchBody(msgspec.Struct):
    """POST /v1/messages/batches."""

    requests: Annotated[list[MessageRequest], Meta(min_length=1, max_length=MAX_REQUESTS)]


def routes(state: ServerState) -> list[ApiRoute]:
    api = MessageBatchesApi(state)
    all, one = "/v1/messages/batches", "/v1/messages/batches/{batch_id}"
    return [
        ApiRoute(all, api.create, body=MessageBatchBody, answer=dict[str, Any]),
        ApiRoute(all, api.list_batches, answer=dict[str, Any]),
        ApiRoute(one, api.retrieve, answer=dict[str, Any]),
        ApiRoute(one, api.delete, methods=["DELETE"], answer=dict[str, Any]),
        ApiRoute(f"{one}/cancel", api.cancel, methods=["POST"], answer=dict[str, Any]),
        ApiRoute(f"{one}/results", api.results),
    ]


def time_of(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class MessageBatchesApi:
    """The handlers."""

    def __init__(self, state: ServerState):
        self._state = state

    async def create(self, request: Request) -> Response:
        """A new batch of messages"""
        state, store = self._state, store_of(self._state)
        body = await read_body(request, state.server_config, MessageBatchBody)
        self._check(body.requests)
        created = int(store.now())
        batch = StoredBatch(
            id=store.new_id("msgbatch_"),
            owner=call_of(request).tenant,
            kind="anthropic",
            urls=[URL],
            created_at=created,
            expires_at=created + EXPIRES_S,
            output_file_id="",
            error_file_id="",
        )
        batch.counts.total = len(body.requests)

        def write(path: Path) -> None:
            with path.open("xb") as file:
                for one in body.requests:
                    line = {"custom_id": one.custom_id, "method": "POST", "url": URL}
                    file.write(msgspec.json.encode(line | {"body": one.params}) + b"\n")

        await on_disk(request, state, partial(store.add_batch, batch, write))
        return JsonAnswer(self._shown(batch, request))

    @staticmethod
    def _check(requests: list[MessageRequest]) -> None:
        places: dict[str, int] = {}
        for i, one in enumerate(requests):
            if (first := places.setdefault(one.custom_id, i)) != i:
                name = f"requests[{i}].custom_id"
                raise invalid(name, f"'{name}' is that of requests[{first}] too.")
            if one.params.get("stream"):
                name = f"requests[{i}].params.stream"
                raise invalid(name, f"'{name}' must be false: a batch does not stream.")

    def _shown(self, batch: StoredBatch, request: Request) -> dict[str, Any]:
        cancelled_at = self._state.files.cancel_requested(batch)
        counts, ended_at = batch.counts, batch.times.get(batch.status) if batch.has_ended else None
        status = "ended" if batch.has_ended else "canceling" if cancelled_at else "in_progress"
        num_left = counts.total - counts.completed - counts.failed - counts.dropped
        # A batch that could not begin has no result for any of its requests.
        num_failed = counts.failed + (num_left if batch.status == "failed" else 0)
        root = self._state.server_config.root_path
        host = f"{request.url.scheme}://{request.url.netloc}{root}"
        url = f"{host}/v1/messages/batches/{batch.id}/results"
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": {
                "processing": 0 if batch.has_ended else num_left,
                "succeeded": counts.completed,
                "errored": num_failed,
                "canceled": counts.dropped if batch.ending == "cancelled" else 0,
                "expired": counts.dropped if batch.ending == "expired" else 0,
            },
            "created_at": time_of(batch.created_at),
            "expires_at": time_of(batch.expires_at),
            "ended_at": time_of(ended_at),
            "cancel_initiated_at": time_of(cancelled_at),
            "archived_at": None,
            "results_url": url if batch.has_ended and batch.has_output else None,
        }

    async def list_batches(self, request: Request) -> Response:
        """The batches of messages of this key"""
        batches = store_of(self._state).batches(call_of(request).tenant, "anthropic")
        after = "after_id"
        if "before_id" in request.query_params:
            # the entries before one of a list are those after it in the list turned round
            batches, after = reversed(list(batches)), "before_id"

        def listed() -> Any:
            return page_of(
                request,
                batches,
                usual=LISTED,
                most=MAX_LISTED,
                shown=lambda batch: self._shown(batch, request),
                after=after,
            )

        page = await on_disk(request, self._state, listed)
        if after == "before_id":
            page.data.reverse()
            page.first_id, page.last_id = page.last_id, page.first_id
        return JsonAnswer(page)

    def _found(self, request: Request) -> StoredBatch:
        id = request.path_params["batch_id"]
        found = store_of(self._state).batch(call_of(request).tenant, id, "anthropic")
        if found is None:
            raise not_found(f"No batch found with id '{id:.100}'.")
        return found

    async def retrieve(self, request: Request) -> Response:
        """A batch of messages"""
        return JsonAnswer(self._shown(self._found(request), request))

    async def cancel(self, request: Request) -> Response:
        """A batch of messages that is being cancelled"""
        batch, store = self._found(request), store_of(self._state)
        if not batch.has_ended:
            await on_disk(request, self._state, partial(store.request_cancel, batch))
        return JsonAnswer(self._shown(batch, request))

    async def delete(self, request: Request) -> Response:
        """The deletion of a batch of messages that has ended"""
        batch = self._found(request)
        if not batch.has_ended:
            message = "Only a batch that has ended can be deleted; cancel it first."
            raise ApiError(400, message, code="batch_not_ended")
        store = store_of(self._state)
        await on_disk(request, self._state, partial(store.delete_batch, batch))
        return JsonAnswer({"id": batch.id, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        """The results of a batch of messages that has ended, as JSON lines"""
        batch = self._found(request)
        path = store_of(self._state).batch_folder(batch) / "output.jsonl"
        if not batch.has_ended or not batch.has_output:
            message = f"The batch '{batch.id}' has no results" + _why(batch.errors)
            raise not_found(message)
        return FileResponse(path, media_type=LINES)


def _why(errors: list[LineError]) -> str:
    if not errors:
        return " yet."
    first = errors[0]
    return f": request {first.line}: {first.message}"
