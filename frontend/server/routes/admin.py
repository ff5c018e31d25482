"""Routes that change the engine for all clients: pause, resume, sleep, wake up, restart, reset the
prefix cache, LoRA. They return 403 without --admin. All query parameters are checked before the
engine is called.

Must not know: how the engine does it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....ipc.errors import EnginePausedError, EngineUsageError
from ...async_llm import AsyncLLM
from ..http.errors import ApiError
from ..http.openapi import ApiRoute
from ..http.queries import QueryReader, flag, one_of, read_query, seconds, some_of
from ..http.sse import JsonAnswer
from ..request_body import read_body
from ..state import ServerState

AdminAction = Callable[..., Awaitable[Any]]  # (engine, **query parameters): what the answer encodes


class LoadLora(msgspec.Struct):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLora(msgspec.Struct):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


async def pause(
    engine: AsyncLLM,
    mode: str | None = None,
    wait_for_inflight_requests: bool = False,
    clear_cache: bool = True,
) -> dict[str, Any]:
    """See AsyncCalls.pause_generation."""
    mode = mode or ("wait" if wait_for_inflight_requests else "abort")
    await engine.pause_generation(mode=mode, clear_cache=clear_cache)
    return {"status": "paused"}


async def resume(engine: AsyncLLM) -> dict[str, Any]:
    await engine.resume()
    return {"status": "resumed"}


async def is_paused(engine: AsyncLLM) -> dict[str, Any]:
    return {"is_paused": await engine.is_paused()}


async def sleep(engine: AsyncLLM, level: str = "1") -> dict[str, Any]:
    """Level 1 frees the KV cache, level 2 also the weights."""
    await engine.sleep(int(level))
    return {"status": "asleep"}


async def wake_up(engine: AsyncLLM, tags: list[str] | None = None) -> dict[str, Any]:
    """?tags=weights&tags=kv_cache wakes only the named parts."""
    await engine.wake_up(tags)
    return {"status": "asleep" if await engine.is_sleeping() else "awake"}


async def is_sleeping(engine: AsyncLLM) -> dict[str, Any]:
    return {"is_sleeping": await engine.is_sleeping()}


async def restart_engines(engine: AsyncLLM, drain_timeout: float = 30.0) -> dict[str, Any]:
    """Each engine process in turn; `drain_timeout`: seconds for the requests that it has."""
    await engine.restart_engines(drain_timeout)
    return {"status": "restarted"}


async def start_profile(engine: AsyncLLM) -> dict[str, Any]:
    """Records the engine's next steps, at most 64, until /stop_profile."""
    await engine.start_profile()
    return {"status": "profiling"}


async def stop_profile(engine: AsyncLLM) -> bytes:
    """The answer is what `quire trace --json` prints."""
    return (await engine.stop_profile()).to_json()


async def reset_prefix_cache(
    engine: AsyncLLM, reset_running_requests: bool = False
) -> dict[str, Any]:
    """`reset` is false if running requests use blocks; `reset_running_requests` preempts and
    recomputes them.
    """
    return {"reset": await engine.reset_prefix_cache(reset_running_requests)}


# path -> (method, action, readers of its query parameters)
ACTIONS: dict[str, tuple[str, AdminAction, dict[str, QueryReader]]] = {
    "/pause": (
        "POST",
        pause,
        {
            "mode": one_of("abort", "wait", "keep"),
            "wait_for_inflight_requests": flag,
            "clear_cache": flag,
        },
    ),
    "/resume": ("POST", resume, {}),
    "/is_paused": ("GET", is_paused, {}),
    "/sleep": ("POST", sleep, {"level": one_of("1", "2")}),
    "/wake_up": ("POST", wake_up, {"tags": some_of("weights", "kv_cache")}),
    "/is_sleeping": ("GET", is_sleeping, {}),
    "/restart_engines": ("POST", restart_engines, {"drain_timeout": seconds}),
    "/start_profile": ("POST", start_profile, {}),
    "/stop_profile": ("POST", stop_profile, {}),
    "/reset_prefix_cache": ("POST", reset_prefix_cache, {"reset_running_requests": flag}),
}


def check_admin(state: ServerState) -> None:
    """Raises ApiError 403 without --admin."""
    if not state.server_config.admin:
        message = (
            "This route changes the engine for all clients and is disabled; --admin enables it."
        )
        raise ApiError(403, message, code="admin_disabled")


def routes(state: ServerState) -> list[ApiRoute]:
    def endpoint(
        action: AdminAction, readers: dict[str, QueryReader]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def run(request: Request) -> Response:
            check_admin(state)
            parameters = read_query(request, readers)
            try:
                return JsonAnswer(await action(state.ready_engine(), **parameters))
            except EnginePausedError as error:
                raise ApiError(409, f"{error}.", code="engine_paused") from None
            except EngineUsageError as error:
                raise ApiError(409, f"{error}.", code="engine_busy") from None

        return run

    async def load_lora(request: Request) -> Response:
        check_admin(state)
        body = await read_body(request, state.server_config, LoadLora)
        engine, inplace = state.ready_engine(), body.load_inplace
        await state.loras.load(
            engine, state.model_name, body.lora_name, body.lora_path, load_inplace=inplace
        )
        return PlainTextResponse(
            f"Success: LoRA adapter '{body.lora_name}' added successfully."
        )  # vLLM's words

    async def unload_lora(request: Request) -> Response:
        check_admin(state)
        body = await read_body(request, state.server_config, UnloadLora)
        await state.loras.unload(state.ready_engine(), body.lora_name, body.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    actions = [
        ApiRoute(path, endpoint(action, readers), methods=[method])
        for path, (method, action, readers) in ACTIONS.items()
    ]
    lora = [
        ApiRoute("/v1/load_lora_adapter", load_lora, methods=["POST"]),
        ApiRoute("/v1/unload_lora_adapter", unload_lora, methods=["POST"]),
    ]
    return [*actions, *lora]
