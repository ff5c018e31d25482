"""Liveness, readiness and version.

Must not know: requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .... import __version__
from ...async_llm import AsyncLLM
from ..http.errors import ApiError
from ..http.openapi import ApiRoute
from ..http.sse import JsonAnswer
from ..state import ServerState

# A response waits this long for the engine's answer. Probes expect a response within one second.
ANSWER_S = 0.5
MAX_SILENCE_S = 1.0  # a process that does not answer a beat for so long is not ready


class Probe:
    """A call that the engine answers as long as it works.

    At most one is in flight, however many responses wait for it.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._call: asyncio.Task | None = None
        self._sent = 0.0  # by the event loop's clock

    async def silent_s(self, engine: AsyncLLM) -> float:
        """Returns the seconds for which the pending call has been unanswered, or 0.0 if the engine
        has just answered.

        Raises EngineDeadError.
        """
        loop = asyncio.get_running_loop()
        if self._call is None or self._call.done():
            self._call = loop.create_task(engine.call_utility(self._method))
            self._sent = loop.time()
        done, _ = await asyncio.wait([self._call], timeout=ANSWER_S)
        if not done:
            return loop.time() - self._sent
        self._call.result()
        return 0.0


class Heartbeat:
    """Checks that an engine works: its process answers at once (beat), and its steps end (ping)."""

    def __init__(self) -> None:
        self._beat, self._ping = Probe("beat"), Probe("ping")

    async def check(self, engine: AsyncLLM) -> None:
        """Raises ApiError 503 if the engine is being replaced, its process does not answer, or a
        step does not end.
        """
        if engine.client.is_replacing:
            text = "The engine has died and is being replaced."
            raise ApiError(503, text, code="engine_restarting")
        of_process, of_step = await asyncio.gather(
            self._beat.silent_s(engine), self._ping.silent_s(engine)
        )
        if of_process > MAX_SILENCE_S:
            raise ApiError(
                503, f"The engine has not answered for {of_process:.0f} s.", code="engine_stuck"
            )
        if of_step > engine.config.service_config.step_timeout_s:
            raise ApiError(
                503, f"The engine has not finished a step for {of_step:.0f} s.", code="engine_stuck"
            )


def routes(state: ServerState) -> list[ApiRoute]:
    heartbeat = Heartbeat()

    def check() -> None:
        if (state.engine is not None and state.engine.errored) or state.loading.error is not None:
            state.ready_engine()

    async def readiness() -> dict[str, Any]:
        await heartbeat.check(state.ready_engine())
        return {"status": "ready", "model": state.model_name}

    return health_routes(check, readiness, lambda: state.num_running)


def health_routes(
    check: Callable[[], None],
    readiness: Callable[[], Awaitable[dict[str, Any]]],
    num_requests: Callable[[], int],
) -> list[ApiRoute]:
    """`check` and `readiness` raise ApiError: the first if this process is to be restarted, the
    second also while no request can be answered.
    """

    async def alive(request: Request) -> Response:
        """Liveness: this process answers.

        Fails only if the engine has failed permanently, not while it loads.
        """
        check()
        return JsonAnswer({"status": "ok"})

    async def ready(request: Request) -> Response:
        """Readiness: the engine is loaded and answers and completes steps."""
        return JsonAnswer(await readiness())

    async def load(request: Request) -> Response:
        """The number of running and waiting requests, in vLLM's format."""
        return JsonAnswer({"server_load": num_requests()})

    async def version(request: Request) -> Response:
        """The version of this server"""
        return JsonAnswer({"version": __version__})

    return [
        ApiRoute("/health", alive),
        ApiRoute("/health/ready", ready),
        ApiRoute("/ping", alive, methods=["GET", "POST"]),  # SageMaker
        ApiRoute("/load", load),
        ApiRoute("/version", version),
    ]
