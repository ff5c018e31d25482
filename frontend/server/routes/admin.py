"""Routes that change the engine for everybody: pause, resume, sleep, wake, forget the prefix cache,
LoRA. They answer only with --admin.

Must not know: how the engine does it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....ipc.errors import EnginePausedError
from ...async_llm import AsyncLLM
from ..http.call import read_body
from ..http.errors import ApiError, invalid, unsupported
from ..http.sse import Json
from ..state import ServerState

Action = Callable[[AsyncLLM, Request], Awaitable[dict[str, Any]]]


class LoadLora(msgspec.Struct):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLora(msgspec.Struct):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


async def pause(engine: AsyncLLM, request: Request) -> dict[str, Any]:
    """?mode=abort|wait|keep; vLLM's older wait_for_inflight_requests=true is mode=wait, and
    clear_cache=true (its default) empties the prefix cache.
    """
    waits = _flag(request, "wait_for_inflight_requests", default=False)
    mode = request.query_params.get("mode", "wait" if waits else "abort")
    await engine.pause(mode)
    if mode != "keep" and _flag(request, "clear_cache", default=True):
        await engine.reset_prefix_cache()
    return {"status": "paused"}


async def resume(engine: AsyncLLM, request: Request) -> dict[str, Any]:
    await engine.resume()
    return {"status": "resumed"}


async def is_paused(engine: AsyncLLM, request: Request) -> dict[str, Any]:
    return {"is_paused": await engine.is_paused()}


async def sleep(engine: AsyncLLM, request: Request) -> dict[str, Any]:
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise invalid(
            "level",
            f"'level' must be 1 (frees the KV cache) or 2 (the weights too), got {level!r:.40}.",
        )
    await engine.sleep(int(level))
    return {"status": "asleep"}


async def wake_up(engine: AsyncLLM, request: Request) -> dict[str, Any]:
    """?tags=weights&tags=kv_cache wakes these alone."""
    await engine.wake_up(request.query_params.getlist("tags") or None)
    return {"status": "asleep" if await engine.is_sleeping() else "awake"}


async def is_sleeping(engine: AsyncLLM, request: Request) -> dict[str, Any]:
    return {"is_sleeping": await engine.is_sleeping()}


async def reset_prefix_cache(engine: AsyncLLM, request: Request) -> dict[str, Any]:
    """`reset`: false where running requests hold blocks of it; ?reset_running_requests=true
    computes those again.
    """
    running = _flag(request, "reset_running_requests", default=False)
    return {"reset": await engine.reset_prefix_cache(running)}


ACTIONS: dict[str, tuple[str, Action]] = {
    "/pause": ("POST", pause),
    "/resume": ("POST", resume),
    "/is_paused": ("GET", is_paused),
    "/sleep": ("POST", sleep),
    "/wake_up": ("POST", wake_up),
    "/is_sleeping": ("GET", is_sleeping),
    "/reset_prefix_cache": ("POST", reset_prefix_cache),
}


def routes(state: ServerState) -> list[Route]:
    def check_allowed() -> None:
        if not state.server_config.admin:
            message = "This route changes the engine for everybody and is switched off; start the server with --admin to have it."
            raise ApiError(403, message, code="admin_disabled")

    def endpoint(action: Action) -> Callable[[Request], Awaitable[Response]]:
        async def run(request: Request) -> Response:
            check_allowed()
            try:
                return Json(await action(state.ready_engine(), request))
            except EnginePausedError as error:
                raise ApiError(409, f"{error}.", code="engine_paused") from None

        return run

    async def load_lora(request: Request) -> Response:
        check_allowed()
        body = await read_body(request, state.server_config, LoadLora)
        raise unsupported(
            "lora_path",
            f"LoRA adapters are not supported yet, so {body.lora_name!r:.80} cannot be loaded.",
        )

    async def unload_lora(request: Request) -> Response:
        check_allowed()
        body = await read_body(request, state.server_config, UnloadLora)
        raise unsupported(
            "lora_name",
            f"LoRA adapters are not supported yet, so there is no {body.lora_name!r:.80} to "
            f"unload.",
        )

    actions = [
        Route(path, endpoint(action), methods=[method])
        for path, (method, action) in ACTIONS.items()
    ]
    lora = [
        Route("/v1/load_lora_adapter", load_lora, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_lora, methods=["POST"]),
    ]
    return [*actions, *lora]


def _flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise invalid(name, f"'{name}' must be true or false, got {value!r:.40}.")
    return value.lower() in ("true", "1")
