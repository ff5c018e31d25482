"""/v1/models: the model that this server serves.

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


def routes(state: ServerState) -> list[Route]:
    def card() -> ModelCard:
        return ModelCard(
            id=state.model_name,
            created=int(state.started),
            root=state.model_name,
            max_model_len=state.max_model_len,
        )

    @described(answer=ModelList)
    async def list_models(request: Request) -> Response:
        """The models of this server"""
        return Json(ModelList(data=[card()]))

    @described(answer=ModelCard)
    async def retrieve_model(request: Request) -> Response:
        """One model of this server"""
        state.ready_engine()
        state.check_model(request.path_params["model"])
        return Json(card())

    return [Route("/v1/models", list_models), Route("/v1/models/{model:path}", retrieve_model)]
