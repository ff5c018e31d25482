"""/v1/batches: OpenAI's batches.

Must not know: how a batch is run.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...batches.store import StoredBatch
from ..apis.responses_turn import MAX_METADATA
from ..durations import parse_duration
from ..http.call import call_of
from ..http.errors import ApiError, invalid, not_found
from ..http.openapi import ApiRoute
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..state import ServerState
from ..stored import on_disk, page_of, store_of
from .files import expiry

# OpenAI's endpoints that this server has, and others with bodies that name a model.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
)
MAX_LISTED, LISTED = 100, 20  # OpenAI's limits
WINDOW_S = (60.0, 30 * 24 * 3600.0)
TIMES = (
    *("in_progress", "finalizing", "completed", "failed", "expired"),
    *("cancelling", "cancelled"),
)


class ExpiresAfter(msgspec.Struct):
    anchor: Literal["created_at"]
    seconds: int


class BatchBody(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = None


def routes(state: ServerState) -> list[ApiRoute]:
    api = BatchesApi(state)
    one = "/v1/batches/{batch_id}"
    return [
        ApiRoute("/v1/batches", api.create, body=BatchBody, answer=dict[str, Any]),
        ApiRoute("/v1/batches", api.list_batches, answer=dict[str, Any]),
        ApiRoute(one, api.retrieve, answer=dict[str, Any]),
        ApiRoute(f"{one}/cancel", api.cancel, methods=["POST"], answer=dict[str, Any]),
    ]


def window_s(text: str) -> float:
    """Returns the seconds of a completion_window. Raises ApiError 400."""
    low, high = WINDOW_S
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = -1.0
    if not low <= seconds <= high:
        message = f"'completion_window' must be a duration from 1m to 720h, got {text!r:.40}."
        raise invalid("completion_window", message)
    return seconds


class BatchesApi:
    """The handlers."""

    def __init__(self, state: ServerState):
        self._state = state

    async def create(self, request: Request) -> Response:
        """A new batch"""
        state, tenant = self._state, call_of(request).tenant
        body, store = await read_body(request, state.server_config, BatchBody), store_of(state)
        if body.endpoint not in ENDPOINTS:
            known = ", ".join(ENDPOINTS)
            message = f"'endpoint' must be one of {known}; got {body.endpoint!r:.80}."
            raise invalid("endpoint", message)
        file = store.file(tenant, body.input_file_id)
        if file is None:
            raise not_found(f"No such File object: {body.input_file_id:.100}")
        if file.purpose != "batch":
            message = f"The file's purpose must be batch, it is {file.purpose}."
            raise invalid("input_file_id", message)
        output_expires_s = None
        if (after := body.output_expires_after) is not None:
            output_expires_s = expiry(after.seconds, "output_expires_after.seconds")
        created = int(store.now())
        batch = StoredBatch(
            id=store.new_id("batch_"),
            owner=tenant,
            kind="openai",
            urls=[body.endpoint],
            created_at=created,
            expires_at=created + int(window_s(body.completion_window)),
            completion_window=body.completion_window,
            input_file_id=file.id,
            metadata=body.metadata,
            output_expires_s=output_expires_s,
            output_file_id=store.new_id("file-"),
            error_file_id=store.new_id("file-"),
        )

        def link(path: Path) -> None:
            os.link(store.content(tenant, file.id), path)

        await on_disk(request, state, partial(store.add_batch, batch, link))
        return JsonAnswer(self._shown(batch))

    def _shown(self, batch: StoredBatch) -> dict[str, Any]:
        times, status = dict(batch.times), batch.status
        cancelled_at = None
        if status in ("validating", "in_progress"):
            cancelled_at = self._state.files.cancel_requested(batch)
        if cancelled_at is not None:
            status = "cancelling"
            times[status] = cancelled_at
        errors = {"object": "list", "data": batch.errors} if batch.errors else None
        counts = batch.counts
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.urls[0],
            "errors": errors,
            "input_file_id": batch.input_file_id,
            "completion_window": batch.completion_window,
            "status": status,
            "output_file_id": batch.output_file_id if batch.has_output else None,
            "error_file_id": batch.error_file_id if batch.has_errors else None,
            "created_at": batch.created_at,
            "expires_at": batch.expires_at,
            **{f"{name}_at": times.get(name) for name in TIMES},
            "request_counts": {
                "total": counts.total,
                "completed": counts.completed,
                # those that a cancelled batch leaves have no result
                "failed": counts.failed + (counts.dropped if batch.ending == "expired" else 0),
            },
            "metadata": batch.metadata,
        }

    async def list_batches(self, request: Request) -> Response:
        """The batches of this key"""
        batches = store_of(self._state).batches(call_of(request).tenant, "openai")

        def listed() -> Any:
            return page_of(request, batches, usual=LISTED, most=MAX_LISTED, shown=self._shown)

        page = await on_disk(request, self._state, listed)
        return JsonAnswer({"object": "list"} | msgspec.structs.asdict(page))

    def _found(self, request: Request) -> StoredBatch:
        id = request.path_params["batch_id"]
        found = store_of(self._state).batch(call_of(request).tenant, id, "openai")
        if found is None:
            raise not_found(f"No batch found with id '{id:.100}'.")
        return found

    async def retrieve(self, request: Request) -> Response:
        """A batch"""
        return JsonAnswer(self._shown(self._found(request)))

    async def cancel(self, request: Request) -> Response:
        """A batch that is being cancelled"""
        batch, store = self._found(request), store_of(self._state)
        if batch.has_ended or batch.ending is not None:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise ApiError(409, message, code="batch_ended")
        await on_disk(request, self._state, partial(store.request_cancel, batch))
        return JsonAnswer(self._shown(batch))
