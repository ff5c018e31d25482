"""/api/chat and /api/generate: Ollama's API, one JSON object per line.

Must not know: what its fields mean for a prompt (see ollama_turn.py), templates, the engine.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from ..apis.ollama_answer import OllamaAnswer, empty_answer
from ..apis.ollama_turn import (
    CHAT_NAMES,
    GENERATE_NAMES,
    OllamaChatBody,
    OllamaGenerateBody,
    check_body,
    prepare_generate,
    prepare_ollama_chat,
)
from ..http.call import HttpCall, call_of
from ..http.errors import renaming, unsupported
from ..http.openapi import LINES, ApiRoute
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..state import ServerState


def routes(state: ServerState) -> list[ApiRoute]:
    async def chat(request: Request) -> Any:
        """Ollama's chat"""
        body = await read_body(request, state.server_config, OllamaChatBody)
        return await respond(state, call_of(request), body, bool(body.messages))

    async def generate(request: Request) -> Any:
        """Ollama's generate"""
        body = await read_body(request, state.server_config, OllamaGenerateBody)
        return await respond(state, call_of(request), body, bool(body.prompt))

    answer = dict[str, Any]
    return [
        ApiRoute("/api/chat", chat, body=OllamaChatBody, answer=answer, streams=LINES),
        ApiRoute("/api/generate", generate, body=OllamaGenerateBody, answer=answer, streams=LINES),
    ]


async def respond(
    state: ServerState,
    call: HttpCall,
    body: OllamaChatBody | OllamaGenerateBody,
    has_prompt: bool,
) -> Any:
    """Answers a checked body. Clients load or unload a model with one that has no prompt."""
    state.ready_engine()
    model = check_body(state, call, body)
    state.check_generates()
    is_chat = isinstance(body, OllamaChatBody)
    if not has_prompt:
        if body.keep_alive in (0, "0", "0s") and not state.is_on_demand:
            raise unsupported(
                "keep_alive",
                "'keep_alive' cannot be 0: the model stays loaded while the server runs.",
            )
        return JsonAnswer(empty_answer(model, "load", is_chat=is_chat))
    with renaming(CHAT_NAMES if is_chat else GENERATE_NAMES):
        if isinstance(body, OllamaChatBody):
            run = await prepare_ollama_chat(state, call, body, f"chat-{call.suffix}")
        else:
            run = await prepare_generate(state, call, body, f"generate-{call.suffix}")
    answer = OllamaAnswer(state, call, model, run, is_chat=is_chat)
    return await answer.respond(streams=body.stream is not False)
