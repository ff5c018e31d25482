"""/v1/files: OpenAI's files, of which there are those of batches.

Must not know: what a file holds, how a batch is run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ...batches.store import KEEP_S, StoredFile
from ..http.call import call_of
from ..http.errors import invalid, missing, not_found, unsupported
from ..http.openapi import ApiRoute
from ..http.sse import JsonAnswer
from ..multipart import receive_form
from ..state import ServerState
from ..stored import disk_error, on_disk, page_of, store_of

MAX_LISTED = 10_000  # OpenAI's limit
EXPIRES_S = (3600, 30 * 24 * 3600)  # OpenAI's limits of expires_after
PURPOSES = ("batch", "batch_output")  # the second one is that of results


def routes(state: ServerState) -> list[ApiRoute]:
    api = FilesApi(state)
    one = "/v1/files/{file_id}"
    return [
        ApiRoute("/v1/files", api.create, methods=["POST"], answer=dict[str, Any]),
        ApiRoute("/v1/files", api.list_files, answer=dict[str, Any]),
        ApiRoute(one, api.retrieve, answer=dict[str, Any]),
        ApiRoute(one, api.delete, methods=["DELETE"], answer=dict[str, Any]),
        ApiRoute(f"{one}/content", api.content),
    ]


def shown(file: StoredFile) -> dict[str, Any]:
    fields = {"object": "file", "status": "processed", "status_details": None}
    return msgspec.structs.asdict(file) | fields


def expiry(seconds: Any, param: str) -> int:
    """Checks the seconds of an expiry. Raises ApiError 400."""
    low, high = EXPIRES_S
    if isinstance(seconds, str):
        seconds = int(seconds) if seconds.isascii() and seconds.isdigit() else None
    if not isinstance(seconds, int) or not low <= seconds <= high:
        raise invalid(param, f"'{param}' must be a number of seconds from {low} to {high}.")
    return seconds


class FilesApi:
    """The handlers."""

    def __init__(self, state: ServerState):
        self._state = state

    async def create(self, request: Request) -> Response:
        """A new file, which a form sends"""
        state, tenant = self._state, call_of(request).tenant
        store = store_of(state)
        upload = await on_disk(request, state, partial(store.new_file, tenant))
        try:
            most = state.server_config.max_file_bytes
            form = await receive_form(request, state.server_config, most, upload.write)
            for name in ("filename", "purpose"):
                if name not in form:
                    raise missing("file" if name == "filename" else name)
            if form["purpose"] != "batch":
                purpose = form["purpose"]
                message = f"'purpose' must be batch, got {purpose!r:.40}."
                raise unsupported("purpose", message)
            file = await on_disk(
                request,
                state,
                partial(upload.finish, form["filename"], "batch", self._expiry(form)),
            )
        except OSError as error:
            raise disk_error(error) from error
        finally:
            upload.discard()
        return JsonAnswer(shown(file))

    @staticmethod
    def _expiry(form: dict[str, str]) -> int:
        """Returns the seconds for which a file is kept."""
        anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return int(KEEP_S)
        if anchor != "created_at":
            raise invalid("expires_after[anchor]", "'expires_after[anchor]' must be created_at.")
        return expiry(seconds, "expires_after[seconds]")

    async def list_files(self, request: Request) -> Response:
        """The files of this key"""
        store, tenant, query = store_of(self._state), call_of(request).tenant, request.query_params
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise invalid("order", "'order' must be asc or desc.")

        def listed() -> Any:
            files = [f for f in store.files(tenant) if purpose in (None, f.purpose)]
            files = files if order == "asc" else files[::-1]
            return page_of(request, files, usual=MAX_LISTED, most=MAX_LISTED, shown=shown)

        page = await on_disk(request, self._state, listed)
        return JsonAnswer({"object": "list"} | msgspec.structs.asdict(page))

    def _found(self, request: Request) -> StoredFile:
        id = request.path_params["file_id"]
        found = store_of(self._state).file(call_of(request).tenant, id)
        if found is None:
            raise not_found(f"No such File object: {id:.100}")
        return found

    async def retrieve(self, request: Request) -> Response:
        """A file, without its content"""
        return JsonAnswer(shown(self._found(request)))

    async def delete(self, request: Request) -> Response:
        """The deletion of a file"""
        file, store = self._found(request), store_of(self._state)
        await on_disk(
            request, self._state, partial(store.delete_file, call_of(request).tenant, file.id)
        )
        return JsonAnswer({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """The content of a file"""
        file = self._found(request)
        path = store_of(self._state).content(call_of(request).tenant, file.id)
        return FileResponse(path, media_type="application/octet-stream")
