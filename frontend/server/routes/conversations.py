"""/v1/conversations: OpenAI's conversations, to which /v1/responses adds its items.

Must not know: templates, the engine, how a response is generated.

A conversation is kept in the store of responses: it has the same owner, the same limits, and its
items can be referred to.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ..apis.responses_items import MAX_CONVERSATION, Item, items_of, num_parts, too_long
from ..apis.responses_turn import MAX_METADATA
from ..http.call import call_of
from ..http.errors import ApiError, invalid, not_found, unsupported
from ..http.openapi import ApiRoute
from ..http.queries import integer
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..response_store import ResponseStore, Stored
from ..state import ServerState

PREFIX = "conv_"
MAX_LISTED, LISTED = 100, 20  # items per page of a list; OpenAI's limits
ConversationMetadata = Annotated[dict[str, str], Meta(max_length=MAX_METADATA)]


MAX_ADDED = 20  # items in one request; OpenAI's limit


class ConversationBody(msgspec.Struct, kw_only=True):
    """POST /v1/conversations."""

    items: Annotated[list[Item], Meta(max_length=MAX_ADDED)] | None = None
    metadata: ConversationMetadata | None = None


class MetadataBody(msgspec.Struct, kw_only=True):
    """POST /v1/conversations/{id}."""

    metadata: ConversationMetadata


class ItemsBody(msgspec.Struct, kw_only=True):
    """POST /v1/conversations/{id}/items."""

    items: Annotated[list[Item], Meta(min_length=1, max_length=MAX_ADDED)]


def routes(state: ServerState) -> list[ApiRoute]:
    api = ConversationsApi(state)
    one = "/v1/conversations/{conversation_id}"
    return [
        ApiRoute("/v1/conversations", api.create, body=ConversationBody, answer=dict[str, Any]),
        ApiRoute(one, api.show, answer=dict[str, Any]),
        ApiRoute(one, api.update, body=MetadataBody, answer=dict[str, Any]),
        ApiRoute(one, api.delete, methods=["DELETE"], answer=dict[str, Any]),
        ApiRoute(f"{one}/items", api.list_items, answer=dict[str, Any]),
        ApiRoute(f"{one}/items", api.add_items, body=ItemsBody, answer=dict[str, Any]),
        ApiRoute(f"{one}/items/{{item_id}}", api.item, answer=dict[str, Any]),
        ApiRoute(
            f"{one}/items/{{item_id}}", api.delete_item, methods=["DELETE"], answer=dict[str, Any]
        ),
    ]


def find_conversation(store: ResponseStore, tenant: str, conversation_id: str) -> Stored:
    """Raises ApiError 404."""
    found = store.get(tenant, conversation_id) if conversation_id.startswith(PREFIX) else None
    if found is None:
        raise not_found(f"Conversation with id {conversation_id!r:.100} not found.")
    return found


def put_items(
    store: ResponseStore, tenant: str, conversation_id: str, items: list[Item]
) -> dict[str, Any]:
    """Replaces the items of a conversation, which becomes the latest. Returns its object."""
    found = find_conversation(store, tenant, conversation_id)
    store.put(tenant, Stored(found.response, items, []))
    return found.response


def add_to_conversation(
    store: ResponseStore, tenant: str, conversation_id: str, items: list[Item]
) -> None:
    """Adds items behind those that are there now. A conversation that was deleted in the meantime
    stays deleted.
    """
    found = store.get(tenant, conversation_id)
    if found is not None:
        put_items(store, tenant, conversation_id, [*found.input_items, *items])


def page_of(request: Request, items: list[Item]) -> dict[str, Any]:
    """Returns the page of a list that `limit`, `order` and `after` ask for. Raises ApiError."""
    query = request.query_params
    limit = integer(request, "limit", default=LISTED, least=1, most=MAX_LISTED)
    if query.get("order", "desc") not in ("asc", "desc"):
        raise invalid("order", "'order' must be asc or desc.")
    if query.get("order", "desc") == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise invalid(
                "after", f"'after' must be the id of one of the items, got {after!r:.100}."
            )
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(page) < len(items)}


def _new_items(given: list[Item] | None) -> list[Item]:
    items = items_of(given or [])
    for i, item in enumerate(items):
        if item.type == "item_reference":
            raise unsupported(
                f"items[{i}].type", f"'items[{i}]' is a reference: a conversation holds items."
            )
    return items


class ConversationsApi:
    """The handlers, which work on the store of responses."""

    def __init__(self, state: ServerState):
        self._state = state
        self._store = state.responses

    def _found(self, request: Request) -> tuple[str, str, Stored]:
        """Returns the owner, the id, and the conversation."""
        self._state.check_open()
        tenant, conversation_id = call_of(request).tenant, request.path_params["conversation_id"]
        return tenant, conversation_id, find_conversation(self._store, tenant, conversation_id)

    async def create(self, request: Request) -> Response:
        """A new conversation"""
        body = await read_body(request, self._state.server_config, ConversationBody)
        self._state.check_open()
        if not self._store.keeps:
            raise ApiError(
                400,
                "This server stores no conversations: it runs with --max-stored-responses 0.",
                code="unsupported_value",
            )
        conversation = {
            "id": PREFIX + secrets.token_hex(24),
            "object": "conversation",
            "created_at": int(self._state.now()),
            "metadata": body.metadata or {},
        }
        self._store.put(call_of(request).tenant, Stored(conversation, _new_items(body.items), []))
        return JsonAnswer(conversation)

    async def show(self, request: Request) -> Response:
        """A conversation"""
        _, _, found = self._found(request)
        return JsonAnswer(found.response)

    async def update(self, request: Request) -> Response:
        """A conversation with other metadata"""
        body = await read_body(request, self._state.server_config, MetadataBody)
        tenant, conversation_id, found = self._found(request)
        changed = found.response | {"metadata": body.metadata}
        self._store.put(tenant, Stored(changed, found.input_items, []))
        return JsonAnswer(changed)

    async def delete(self, request: Request) -> Response:
        """The deletion of a conversation"""
        tenant, conversation_id, _ = self._found(request)
        self._store.pop(tenant, conversation_id)
        return JsonAnswer(
            {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        )

    async def list_items(self, request: Request) -> Response:
        """The items of a conversation"""
        _, _, found = self._found(request)
        return JsonAnswer(page_of(request, found.input_items))

    async def add_items(self, request: Request) -> Response:
        """New items of a conversation"""
        body = await read_body(request, self._state.server_config, ItemsBody)
        tenant, conversation_id, found = self._found(request)
        items = _new_items(body.items)
        if sum(map(num_parts, found.input_items)) + sum(map(num_parts, items)) > MAX_CONVERSATION:
            raise too_long("items")
        add_to_conversation(self._store, tenant, conversation_id, items)
        ends = {"first_id": items[0].id, "last_id": items[-1].id}
        return JsonAnswer({"object": "list", "data": items, **ends, "has_more": False})

    def _item(self, request: Request, found: Stored) -> Item:
        item_id = request.path_params["item_id"]
        for item in found.input_items:
            if item.id == item_id:
                return item
        raise not_found(f"Item with id {item_id!r:.100} not found in this conversation.")

    async def item(self, request: Request) -> Response:
        """An item of a conversation"""
        _, _, found = self._found(request)
        return JsonAnswer(self._item(request, found))

    async def delete_item(self, request: Request) -> Response:
        """A conversation without one of its items"""
        tenant, conversation_id, found = self._found(request)
        gone = self._item(request, found)
        rest = [item for item in found.input_items if item is not gone]
        return JsonAnswer(put_items(self._store, tenant, conversation_id, rest))
