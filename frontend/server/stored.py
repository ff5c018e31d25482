"""What the routes of files and batches share: the store, pages of lists, and errors of the disk.

Must not know: what a file or a batch is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from ..batches.store import FullError, Store
from .admission import in_turn
from .http.call import call_of
from .http.errors import ApiError, invalid
from .http.queries import integer
from .state import ServerState

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Page(msgspec.Struct):
    """One page of a list, with the ids of its first and last entry."""

    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


def store_of(state: ServerState) -> Store:
    """Raises ApiError 403 if the server keeps no files."""
    if not state.server_config.max_stored_file_bytes:
        message = "This server keeps no files: it runs with --max-stored-file-bytes 0."
        raise ApiError(403, message, code="files_disabled")
    return state.files


async def on_disk(request: Request, state: ServerState, work: Callable[[], Result]) -> Result:
    """Returns what `work` returns, in a thread. Raises ApiError 507 if the disk is full or takes no
    file.
    """
    try:
        return await in_turn(state.work_turns, call_of(request), work)
    except OSError as error:
        raise disk_error(error) from error


def disk_error(error: OSError) -> ApiError:
    if isinstance(error, FullError):
        return ApiError(507, f"No room for more files: {error}.", code="insufficient_storage")
    logger.error("a file cannot be stored: %s", error)
    message = f"The server's disk did not take the file: {error.strerror or 'it failed'}."
    return ApiError(507, message, code="insufficient_storage")


def page_of(
    request: Request,
    entries: Iterable[Any],
    *,
    usual: int,
    most: int,
    shown: Callable[[Any], dict[str, Any]],
    after: str = "after",
) -> Page:
    """Returns the page that `limit` and the parameter called `after` ask for. `usual` and `most`
    are for the limit. Raises ApiError 400.
    """
    limit = integer(request, "limit", default=usual, least=1, most=most)
    wanted, entries = request.query_params.get(after), iter(entries)
    if wanted is not None and not any(entry.id == wanted for entry in entries):
        raise invalid(after, f"'{after}' must be the id of an entry, got {wanted!r:.100}.")
    data, has_more = [], False
    for entry in entries:
        if len(data) == limit:
            has_more = True
            break
        data.append(shown(entry))
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return Page(data, has_more, *ends)
