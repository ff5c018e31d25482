"""/v1/models: the model that this server serves, and its adapters.

Must not know: files, weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..http.openapi import ApiRoute
from ..http.sse import JsonAnswer
from ..state import ServerState


class ModelCard(msgspec.Struct, kw_only=True):
    """OpenAI's model object, with vLLM's `root`, `parent` and `max_model_len`.

    has_chat_template, capabilities: of a model that is in memory; null for an adapter, which has
    its model's.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int
    has_chat_template: bool | None = None
    capabilities: list[str] | None = None  # completion or embedding, tools, thinking, vision


class ModelList(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`models`: the same in the form of Codex, which asks with its `client_version`."""

    object: Literal["list"] = msgspec.field(default_factory=lambda: "list")  # never omitted
    data: list[ModelCard]
    models: list[dict[str, Any]] | None = None


def listed(request: Request, cards: list[ModelCard]) -> ModelList:
    asks_codex = "client_version" in request.query_params
    return ModelList(data=cards, models=list(map(_for_codex, cards)) if asks_codex else None)


def _for_codex(card: ModelCard) -> dict[str, Any]:
    """Returns what Codex wants to know of a model. Values that it may leave out are its own
    defaults.
    """
    return {
        "slug": card.id,
        "display_name": card.id,
        "description": None,
        "supported_reasoning_levels": [],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "upgrade": None,
        "base_instructions": "",
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": card.max_model_len,
        "experimental_supported_tools": [],
        "input_modalities": ["text", *(["image"] if "vision" in (card.capabilities or ()) else [])],
    }


def cards_of_loras(state: ServerState, max_model_len: int) -> list[ModelCard]:
    """Returns the cards of adapters. An adapter's root is its path, and its parent the model."""
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


def routes(state: ServerState) -> list[ApiRoute]:
    def cards() -> list[ModelCard]:
        max_model_len = state.max_model_len
        own = [
            ModelCard(
                id=name,
                created=int(state.started),
                root=state.model_name,
                max_model_len=max_model_len,
                has_chat_template=bool(state.template_text),
                capabilities=state.capabilities,
            )
            for name in state.model_names
        ]
        return [*own, *cards_of_loras(state, max_model_len)]

    def find(name: str) -> ModelCard:
        state.ready_engine()
        served = state.check_model(name)
        return next(card for card in cards() if card.id == served)

    return card_routes(cards, find)


def card_routes(
    cards: Callable[[], list[ModelCard]], find: Callable[[str], ModelCard]
) -> list[ApiRoute]:
    """`find` raises ApiError 404 for an unknown name."""

    async def list_models(request: Request) -> Response:
        """The models of this server, and its adapters"""
        return JsonAnswer(listed(request, cards()))

    async def retrieve_model(request: Request) -> Response:
        """One model or adapter of this server"""
        return JsonAnswer(find(request.path_params["model"]))

    return [
        ApiRoute("/v1/models", list_models, answer=ModelList),
        ApiRoute("/v1/models/{model:path}", retrieve_model, answer=ModelCard),
    ]
