"""Whether the server lives, whether it can work, and which version it is.
May know: ServerState, AsyncLLM's ping.
Must not know: requests."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import ApiError
from ..sse import Json
from ..state import ServerState


def routes(state: ServerState) -> list[Route]:
    async def health(request: Request) -> Response:
        """Live: this process answers. Dead engines and loading ones do not change that, except that nothing will ever work again."""
        if state.engine is not None and state.engine.errored or state.loading.error is not None:
            state.ready_engine()
        return Json({"status": "ok"})

    async def ready(request: Request) -> Response:
        """Ready: the engine is there and steps; it answers a ping between two steps."""
        engine = state.ready_engine()
        try:
            await asyncio.wait_for(engine.call_utility("ping"), state.server_config.step_timeout_s)
        except TimeoutError:
            message = f"The engine has not finished a step for {state.server_config.step_timeout_s:g} s."
            raise ApiError(503, message, code="engine_stuck") from None
        return Json({"status": "ready", "model": state.model_name})

    async def version(request: Request) -> Response:
        from .... import __version__

        return Json({"version": __version__})

    return [Route("/health", health), Route("/health/ready", ready), Route("/version", version)]
