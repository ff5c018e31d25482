"""The routes of a server with several models: each request goes to the handler of its model, once
the model is ready.

Must not know: what a handler does, when models leave memory.

The routes of one model (`frontend/server/routes/`) are made once for each slot. A route whose body
has a field `model` is answered by that model, which is loaded first; other routes about an engine
take `?model=NAME`, and load nothing. Lists, health and metrics cover all models.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...ipc.log_format import name_model
from .apis.ollama_answer import empty_answer, time_text
from .apis.ollama_turn import plain_name
from .durations import parse_duration
from .http.call import call_of
from .http.errors import invalid, missing
from .http.openapi import ApiRoute
from .http.sse import JsonAnswer
from .model_slot import ModelSlot
from .models import Models
from .pulls import Pulls
from .request_body import read_body, receive_body
from .routes import (
    admin,
    batches,
    chat,
    cohere,
    completions,
    conversations,
    engine_trace,
    engine_view,
    files,
    health,
    message_batches,
    messages,
    metrics,
    ollama,
    ollama_embed,
    ollama_models,
    page,
    pooling,
    responses,
    scores,
    tokenize,
)
from .routes import (
    models as model_routes,
)
from .state import ServerState, shutting_down

OF_ONE_MODEL = (
    chat,
    completions,
    conversations,
    responses,
    messages,
    ollama,
    tokenize,
    pooling,
    scores,
    cohere,
    ollama_embed,
    engine_trace,
    engine_view,
    admin,
)
OLLAMA = "/api/"
Handler = Callable[[Request], Awaitable[Any]]
HandlerOfSlot = Callable[[ModelSlot], Handler]


class ModelFields(msgspec.Struct):
    """These fields decide on the model. Other fields, and errors in them, are the handler's."""

    model: str | None = None
    keep_alive: float | str | None = None
    prompt: str | list[Any] | None = None
    messages: list[Any] | None = None
    input: str | list[Any] | None = None


class Leased:
    """A response during which its model stays in memory."""

    def __init__(self, response: Any, release: Callable[[], None]):
        self._response = response
        self._release = release

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._release()


def routes_of_models(front: ServerState, models: Models) -> list[ApiRoute]:
    """`front` is the state of the server itself, which has no engine."""
    own = [
        *files.routes(front),
        *batches.routes(front),
        *message_batches.routes(front),
        *_health_routes(front, models),
        *metrics.routes_of_several(front, lambda: [s.state for s in models.slots.values()]),
        *_card_routes(front, models),
        *_ollama_routes(front, models),
    ]
    return [*own, *_dispatched(front, models), *page.routes(front)]


# ------------------------------------------------------------ dispatch


def _dispatched(front: ServerState, models: Models) -> list[ApiRoute]:
    of_slots: WeakKeyDictionary[ModelSlot, list[ApiRoute]] = WeakKeyDictionary()

    def routes_of(slot: ModelSlot) -> list[ApiRoute]:
        """Makes the routes when they are first used: slots come and go."""
        if slot not in of_slots:
            of_slots[slot] = [r for family in OF_ONE_MODEL for r in family.routes(slot.state)]
        return of_slots[slot]

    def handler_of(number: int, slot: ModelSlot) -> Handler:
        return routes_of(slot)[number].endpoint

    found = []
    for number, first in enumerate(routes_of(models.default)):
        of_slot = functools.partial(handler_of, number)
        has_model = first.body is not None and "model" in first.body.__struct_fields__
        dispatch = _by_body if has_model else _by_query
        found.append(first.with_endpoint(dispatch(front, models, of_slot)))
    return found


def _by_query(front: ServerState, models: Models, handler_of: HandlerOfSlot) -> Handler:
    async def endpoint(request: Request) -> Any:
        slot = models.find(request.query_params.get("model"))
        query = request.query_params.multi_items()
        rest = urlencode([(name, value) for name, value in query if name != "model"])
        scope = {**request.scope, "query_string": rest.encode()}
        name_model(slot.name)
        return await handler_of(slot)(Request(scope, request.receive))

    return endpoint


def _by_body(front: ServerState, models: Models, handler_of: HandlerOfSlot) -> Handler:
    async def endpoint(request: Request) -> Any:
        raw = await receive_body(request, front.server_config)
        try:
            asked = msgspec.json.decode(raw, type=ModelFields)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Every handler refuses such a body, with the reason.
            return await handler_of(models.default)(request)
        is_ollama = request.scope["path"].startswith(OLLAMA)
        if is_ollama and not asked.model:
            raise missing("model")
        name = plain_name(asked.model, models.slots) if is_ollama and asked.model else asked.model
        slot, keep_alive_s = models.find(name), None
        if is_ollama and asked.keep_alive is not None:
            keep_alive_s = _keep_alive(asked.keep_alive)
            if keep_alive_s == 0 and not (asked.prompt or asked.messages or asked.input):
                return await _unload(models, slot, request.scope["path"])
        name_model(slot.name)
        await models.acquire(slot)
        release = functools.partial(models.release, slot, keep_alive_s)
        try:
            response = await handler_of(slot)(request)
        except BaseException:
            release()
            raise
        return Leased(response, release)

    return endpoint


def _keep_alive(value: float | str) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise invalid("keep_alive", f"'keep_alive' {error}.") from None


async def _unload(models: Models, slot: ModelSlot, path: str) -> JsonAnswer:
    """Returns the response to an empty request with keep_alive 0, with which clients unload a
    model.
    """
    await models.unload(slot)
    return JsonAnswer(empty_answer(slot.name, "unload", is_chat=path.endswith("/chat")))


# ------------------------------------------------------------ about all models


def _health_routes(front: ServerState, models: Models) -> list[ApiRoute]:
    heartbeat = health.Heartbeat()

    async def readiness() -> dict[str, Any]:
        """The default model has been loaded, and is not stuck."""
        slot = models.default
        if front.is_draining:
            raise shutting_down()
        if not slot.has_loaded:
            raise slot.state.not_loaded()
        if slot.phase == "ready" and slot.state.engine is not None:
            await heartbeat.check(slot.state.engine)
        phases = {slot.name: slot.phase for slot in models.slots.values()}
        return {"status": "ready", "model": slot.name, "models": phases}

    def check() -> None:
        """A model that fails is no reason to restart the others."""

    def num_requests() -> int:
        return sum(slot.num_users for slot in models.slots.values())

    return health.health_routes(check, readiness, num_requests)


def _card_routes(front: ServerState, models: Models) -> list[ApiRoute]:
    def cards_of(slot: ModelSlot) -> list[model_routes.ModelCard]:
        card = model_routes.ModelCard(
            id=slot.name,
            created=int(front.started),
            root=slot.args.model,
            max_model_len=slot.plan.max_model_len,
            has_chat_template=slot.has_chat_template,
            capabilities=slot.state.capabilities,
        )
        return [card, *model_routes.cards_of_loras(slot.state, slot.plan.max_model_len)]

    def cards() -> list[model_routes.ModelCard]:
        """Lists the default model first."""
        slots = sorted(models.slots.values(), key=lambda slot: slot is not models.default)
        return [card for slot in slots for card in cards_of(slot)]

    def find(name: str) -> model_routes.ModelCard:
        found = cards_of(models.find(name))
        return next((card for card in found if card.id == name), found[0])

    return model_routes.card_routes(cards, find)


class SlotCatalog:
    """The catalog of a server with several models, which clients may pull."""

    def __init__(self, front: ServerState, models: Models, pulls: Pulls):
        self._front = front
        self._models = models
        self._pulls = pulls
        self._details: WeakKeyDictionary[ModelSlot, dict[str, Any]] = WeakKeyDictionary()

    def listed(self) -> list[dict[str, Any]]:
        modified = {"modified_at": time_text(self._front.started)}
        found = []
        for slot in self._models.slots.values():
            found += [model := _tag(slot), *ollama_models.loras_of(slot.state, model)]
        return [one | modified for one in found]

    def running(self) -> list[dict[str, Any]]:
        return [
            _tag(slot)
            | ollama_models.running_fields(
                slot.config, slot.needs.weights_bytes, slot.plan.max_model_len, slot.unloads_at
            )
            for slot in self._models.slots.values()
            if slot.phase == "ready"
        ]

    async def details(self, body: ollama_models.ShowBody) -> dict[str, Any]:
        """The first time, the model is loaded."""
        slot = self._models.find(ollama_models.named_model(body, self._models.slots))
        if slot not in self._details:
            await self._models.acquire(slot)
            try:
                self._details[slot] = ollama_models.shown(slot.state)
            finally:
                self._models.release(slot)
        return self._details[slot]

    def pull(
        self, body: ollama_models.PullBody, tenant: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        return self._pulls.pull(ollama_models.named_model(body, self._models.slots), tenant)


def _tag(slot: ModelSlot) -> dict[str, Any]:
    return ollama_models.tag(slot.name, slot.config) | {"size": slot.needs.weights_bytes}


def _ollama_routes(front: ServerState, models: Models) -> list[ApiRoute]:
    pulls = Pulls(models)

    async def delete(request: Request) -> Response:
        """Deletes a model that clients have pulled"""
        body = await read_body(request, front.server_config, ollama_models.DeleteBody)
        name = ollama_models.named_model(body, models.slots)
        await pulls.delete(name, call_of(request).tenant)
        return Response()

    body = ollama_models.DeleteBody
    deletion = ApiRoute("/api/delete", delete, methods=["DELETE", "POST"], body=body)
    return [*ollama_models.catalog_routes(front, SlotCatalog(front, models, pulls)), deletion]
