"""/v1/models: the model that this server serves, and its adapters.

Must not know: files, weights.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..http.openapi import described
from ..http.sse import Json
from ..state import ServerState


class ModelCard(msgspec.Struct, kw_only=True):
    """OpenAI's model object, with vLLM's `root`, `parent` and `max_model_len`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def cards_of_loras(state: ServerState, max_model_len: int) -> list[ModelCard]:
    """An adapter's root is its path, and its parent the model."""
    return [
        ModelCard(
            id=name,
            created=int(state.started),
            root=lora.lora_path,
            parent=state.model_name,
            max_model_len=max_model_len,
        )
        for name, lora in state.loras.by_name.items()
    ]


def routes(state: ServerState) -> list[Route]:
    def cards() -> list[ModelCard]:
        max_model_len = state.max_model_len
        own = [
            ModelCard(
                id=name,
                created=int(state.started),
                root=state.model_name,
                max_model_len=max_model_len,
            )
            for name in state.model_names
        ]
        return [*own, *cards_of_loras(state, max_model_len)]

    @described(answer=ModelList)
    async def list_models(request: Request) -> Response:
        """The models of this server, and its adapters"""
        return Json(ModelList(data=cards()))

    @described(answer=ModelCard)
    async def retrieve_model(request: Request) -> Response:
        """One model or adapter of this server"""
        state.ready_engine()
        name = state.check_model(request.path_params["model"])
        return Json(next(card for card in cards() if card.id == name))

    return [Route("/v1/models", list_models), Route("/v1/models/{model:path}", retrieve_model)]
