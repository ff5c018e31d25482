"""Liveness, readiness and version.

Must not know: requests.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .... import __version__
from ...async_llm import AsyncLLM
from ..config import ServerConfig
from ..http.errors import ApiError
from ..http.sse import Json
from ..state import ServerState

# How long a response waits for the engine's ping; probes expect a response within one second.
PING_S = 0.5


class Heartbeat:
    """A ping that the engine answers between two steps.

    At most one is in flight, however many probes wait for it.
    """

    def __init__(self) -> None:
        self._ping: asyncio.Task | None = None
        self._sent = 0.0  # by the event loop's clock

    async def silent_s(self, engine: AsyncLLM) -> float:
        """Seconds for which the pending ping has been unanswered, because the engine is in a step;
        0.0 if the engine has just answered.

        Raises EngineDeadError.
        """
        loop = asyncio.get_running_loop()
        if self._ping is None or self._ping.done():
            self._ping, self._sent = loop.create_task(engine.call_utility("ping")), loop.time()
        done, _ = await asyncio.wait([self._ping], timeout=PING_S)
        if not done:
            return loop.time() - self._sent
        self._ping.result()
        return 0.0


async def check_steps(heartbeat: Heartbeat, engine: AsyncLLM, config: ServerConfig) -> None:
    """Raises ApiError 503 if the engine does not finish its step."""
    if (silent_s := await heartbeat.silent_s(engine)) > config.step_timeout_s:
        raise ApiError(
            503, f"The engine has not finished a step for {silent_s:.0f} s.", code="engine_stuck"
        )


async def version(request: Request) -> Response:
    return Json({"version": __version__})


def routes(state: ServerState) -> list[Route]:
    heartbeat = Heartbeat()

    async def health(request: Request) -> Response:
        """Liveness: this process answers.

        Fails only if the engine has failed permanently, not while it loads.
        """
        if (state.engine is not None and state.engine.errored) or state.loading.error is not None:
            state.ready_engine()
        return Json({"status": "ok"})

    async def ready(request: Request) -> Response:
        """Readiness: the engine is loaded and completes steps."""
        await check_steps(heartbeat, state.ready_engine(), state.server_config)
        return Json({"status": "ready", "model": state.model_name})

    async def load(request: Request) -> Response:
        """The number of running and waiting requests, in vLLM's format."""
        return Json({"server_load": len(state.running_ids)})

    return [
        Route("/health", health),
        Route("/health/ready", ready),
        Route("/ping", health, methods=["GET", "POST"], name="ping"),  # SageMaker
        Route("/load", load),
        Route("/version", version),
    ]
