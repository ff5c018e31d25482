"""/api/chat and /api/generate: Ollama's API, one JSON object per line.

Must not know: what its fields mean for a prompt (see ollama_turn.py), templates, the engine.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ..apis.ollama_answer import OllamaAnswer, now
from ..apis.ollama_turn import (
    CHAT_NAMES,
    GENERATE_NAMES,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    check_body,
    prepare_generate,
    prepare_ollama_chat,
)
from ..http.call import call_of
from ..http.errors import renaming, unsupported
from ..http.openapi import LINES, ApiRoute
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..state import ServerState


def routes(state: ServerState) -> list[ApiRoute]:
    async def chat(request: Request) -> Any:
        """Ollama's chat"""
        body = await read_body(request, state.server_config, OllamaChatBody)
        call = call_of(request)
        state.ready_engine()
        model = check_body(state, call, body)
        state.check_generates()
        if not body.messages:
            return _loaded(state, body, model, {"message": {"role": "assistant", "content": ""}})
        with renaming(CHAT_NAMES):
            run = await prepare_ollama_chat(state, call, body, f"chat-{call.suffix}")
        answer = OllamaAnswer(state, call, model, run, is_chat=True)
        return await answer.respond(streams=body.stream is not False)

    async def generate(request: Request) -> Any:
        """Ollama's generate"""
        body = await read_body(request, state.server_config, OllamaGenerateBody)
        call = call_of(request)
        state.ready_engine()
        model = check_body(state, call, body)
        state.check_generates()
        if not body.prompt:
            return _loaded(state, body, model, {"response": ""})
        with renaming(GENERATE_NAMES):
            run = await prepare_generate(state, call, body, f"generate-{call.suffix}")
        answer = OllamaAnswer(state, call, model, run, is_chat=False)
        return await answer.respond(streams=body.stream is not False)

    return [
        ApiRoute("/api/chat", chat, body=OllamaChatBody, answer=dict[str, Any], streams=LINES),
        ApiRoute(
            "/api/generate", generate, body=OllamaGenerateBody, answer=dict[str, Any], streams=LINES
        ),
    ]


def _loaded(state: ServerState, body: OllamaBody, model: str, empty: dict[str, Any]) -> JsonAnswer:
    """The response to an empty request, with which clients load or unload a model."""
    if body.keep_alive in (0, "0", "0s") and not state.is_on_demand:
        raise unsupported(
            "keep_alive",
            "'keep_alive' cannot be 0: the model stays loaded while the server runs.",
        )
    return JsonAnswer(
        {"model": model, "created_at": now(), **empty, "done": True, "done_reason": "load"}
    )
