"""/v1/models: what this server has.
May know: ServerState.
Must not know: files, weights."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..sse import Json
from ..state import ServerState


def routes(state: ServerState) -> list[Route]:
    def card() -> dict[str, Any]:
        """OpenAI's object, with vLLM's `root`, `parent` and `max_model_len`."""
        return {
            "id": state.model_name,
            "object": "model",
            "created": int(state.started),
            "owned_by": "quire",
            "root": state.model_name,
            "parent": None,
            "max_model_len": state.max_model_len,
        }

    async def list_models(request: Request) -> Response:
        return Json({"object": "list", "data": [card()]})

    async def retrieve_model(request: Request) -> Response:
        state.ready_engine()
        state.check_model(request.path_params["model"])
        return Json(card())

    return [Route("/v1/models", list_models), Route("/v1/models/{model:path}", retrieve_model)]
