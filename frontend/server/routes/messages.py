"""/v1/messages: Anthropic's API.

Must not know: what its fields mean for a prompt (see messages_turn.py), templates, the engine.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..apis.messages_answer import MessagesAnswer
from ..apis.messages_turn import NAMES, MessagesBody, PromptBody, turn_of
from ..http.call import call_of
from ..http.errors import renaming
from ..http.openapi import EVENTS, ApiRoute
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..state import ServerState
from ..turns.chat_turn import prepare_chat, render_turn


def routes(state: ServerState) -> list[ApiRoute]:
    async def create(request: Request) -> Any:
        """Anthropic's messages"""
        body, call = await read_body(request, state.server_config, MessagesBody), call_of(request)
        model = state.select_model(body.model, call)
        with renaming(NAMES):
            run = await prepare_chat(state, call, turn_of(state, call, body, f"msg_{call.suffix}"))
        return await MessagesAnswer(state, call, model, run).respond(streams=body.stream)

    async def count_tokens(request: Request) -> Response:
        """How many tokens a message's prompt has"""
        body, call = await read_body(request, state.server_config, PromptBody), call_of(request)
        state.check_model(body.model)
        with renaming(NAMES):
            turn = turn_of(state, call, body, f"msg_{call.suffix}")
            rendered = await render_turn(state, call, turn)
        return JsonAnswer({"input_tokens": len(rendered.token_ids)})

    return [
        ApiRoute("/v1/messages", create, body=MessagesBody, answer=dict[str, Any], streams=EVENTS),
        ApiRoute("/v1/messages/count_tokens", count_tokens, body=PromptBody, answer=dict[str, int]),
    ]
