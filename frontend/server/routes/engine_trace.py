"""POST /v1/engine/trace: records the engine's next steps, with --admin.

Must not know: how steps are recorded, what is shown of them.
"""

from __future__ import annotations

import asyncio
import secrets

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.errors import EnginePausedError
from ....ipc.params import SamplingParams
from ....ipc.trace import MAX_STEPS, place_of_function
from ...async_llm import AsyncLLM
from ...trace.recorded import RecordedTrace
from ..admission import Admission
from ..http.errors import ApiError, invalid
from ..http.openapi import ApiRoute
from ..request_body import read_body
from ..state import ServerState
from ..turns import generation
from ..turns.chat_turn import prepare_chat
from .admin import check_admin

MAX_TIMEOUT_S = 60.0
TOKENS_PER_STEP = 16  # at most, where several decoding steps are one call


class TraceSteps(msgspec.Struct):
    """POST /v1/engine/trace. With `prompt` the steps are those of its completion (and of requests
    beside it); without, those of the requests that there are or that arrive within `timeout_s`.
    """

    steps: int = 4
    prompt: str | None = None
    timeout_s: float = 10.0
    model: str | None = None


def routes(state: ServerState) -> list[ApiRoute]:
    async def trace(request: Request) -> Response:
        """Record the engine's next steps

        The answer is what `quire trace --json` prints. It has fewer steps than asked for if fewer
        were made in time.
        """
        check_admin(state)
        body = await read_body(request, state.server_config, TraceSteps)
        check(body)
        state.check_base(body.model)
        engine = state.ready_engine()
        try:
            async with engine.trace(body.steps) as recorded:
                await wait(engine, body)
        except EnginePausedError as error:
            raise ApiError(409, f"{error}.", code="engine_paused") from None
        places = http_places() | recorded.places
        whole = RecordedTrace(recorded.recorded, recorded.received, places)
        return Response(whole.to_json(), media_type="application/json")

    return [ApiRoute("/v1/engine/trace", trace, body=TraceSteps)]


def http_places() -> dict[str, str]:
    """Returns the stages of an HTTP request before AsyncLLM.generate, as "file:line" by name."""
    functions = read_body, prepare_chat, Admission.wait, generation.run
    return {
        f"{function.__module__.rpartition('.')[2]}.{function.__name__}": place_of_function(function)
        for function in functions
    }


def check(body: TraceSteps) -> None:
    if not 1 <= body.steps <= MAX_STEPS:
        raise invalid("steps", f"'steps' must be between 1 and {MAX_STEPS}, got {body.steps}.")
    if not 0 < body.timeout_s <= MAX_TIMEOUT_S:
        message = f"'timeout_s' must be more than 0, at most {MAX_TIMEOUT_S:.0f}, got "
        raise invalid("timeout_s", f"{message}{body.timeout_s}.")
    if body.prompt is not None and not body.prompt:
        raise invalid("prompt", "'prompt' must not be empty.")


async def wait(engine: AsyncLLM, body: TraceSteps) -> None:
    """Returns when all steps are recorded, the prompt's completion has ended, or the time is up."""
    tasks = {asyncio.ensure_future(engine.call_utility("wait_for_trace"))}
    if body.prompt is not None:
        tasks.add(asyncio.ensure_future(complete(engine, body.prompt, body.steps)))
    try:
        await asyncio.wait(tasks, timeout=body.timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


async def complete(engine: AsyncLLM, prompt: str, num_steps: int) -> None:
    params = SamplingParams(max_tokens=TOKENS_PER_STEP * num_steps, ignore_eos=True)
    async for _ in engine.generate(prompt, params, f"trace-{secrets.token_hex(8)}"):
        pass
