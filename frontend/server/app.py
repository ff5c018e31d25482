"""The ASGI application: all routes, and what they share: ids, keys, errors, the end of a request.

Must not know: what a route does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route, Router

from ... import __version__
from ...ipc.platform_tuning import trim_heap
from .dispatch import OF_ONE_MODEL, routes_of_models
from .http.call import HttpCall, new_request_id, read_deadline
from .http.cross_site import CrossSite, normal_origin
from .http.errors import ENDS, from_status, unsupported
from .http.openapi import ApiRoute, description_routes
from .http.sse import JsonAnswer
from .models import Models
from .request_body import LARGE_BODY
from .routes import batches, files, health, message_batches, metrics, models, ollama_models, page
from .state import ServerState

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("quire.access")
EXPOSED_HEADERS = (
    "x-request-id",
    "x-unknown-params",
    "x-ignored-params",
    "retry-after",
    "openai-processing-ms",
)
# Probes, scrapers and the page at / poll these.
POLLS = frozenset(
    {"/health", "/health/ready", "/metrics", "/ping", "/load", "/v1/requests"}
    | {"/v1/engine/state", "/v1/engine/experts"}
)
CLIENT_LEFT = 499  # nginx's status for a closed connection; used in metrics only
# What these routes show is kept in the memory of a process.
OF_ONE_PROCESS = ("/v1/requests", "/v1/conversations", "/v1/responses/{")
# As they are tried.
FAMILIES = (
    *OF_ONE_MODEL,
    files,
    batches,
    message_batches,
    health,
    metrics,
    models,
    ollama_models,
    page,
)


def make_app(state: ServerState, models: Models | None = None) -> App | CORSMiddleware:
    """Makes the whole server over `state`, or over several models. CORS precedes App, since a
    preflight request carries no key.
    """
    app = App(state, Router(all_routes(state, models), redirect_slashes=False))
    if not state.server_config.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(map(normal_origin, state.server_config.allowed_origins)),
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
        max_age=24 * 60 * 60,
    )


def log_access(scope: Any, status: int, duration_s: float) -> None:
    """Logs one line with client, method, path, status, duration and request id."""
    host, port = scope.get("client") or ("unix", None)
    fields = {
        "client": host if port is None else f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "method": scope["method"],
        # The path is logged as sent: the decoded path may contain line breaks.
        "path": scope["raw_path"].decode("ascii", "replace"),
        "status": "left" if status == CLIENT_LEFT else status,
        "duration_ms": round(1000 * duration_s, 3),
        "request_id": scope["state"]["call"].request_id,
    }
    access_logger.info("%s %s %s %s %.1f ms %s", *fields.values(), extra={"fields": fields})


def all_routes(state: ServerState, models: Models | None = None) -> list[ApiRoute]:
    if models is None:
        routes = [route for family in FAMILIES for route in family.routes(state)]
        if state.server_config.api_server_count > 1:
            routes = list(map(without_memory, routes))
    else:
        routes = routes_of_models(state, models)
    return [*routes, *description_routes(routes, __version__, state.server_config.root_path)]


def without_memory(route: ApiRoute) -> ApiRoute:
    """Returns the route, or one that refuses its requests if they are about what a server keeps of
    earlier ones: of several processes, another one may have it.
    """
    if not route.path.startswith(OF_ONE_PROCESS):
        return route

    async def refuse(request: Request) -> Response:
        raise unsupported("api_server_count", f"{route.path} needs a server of one process.")

    return route.with_endpoint(refuse)


class AnswerSender:
    """ASGI's `send` of one call: adds the call's headers to its answer, and notes the status."""

    def __init__(self, send: Any, call: HttpCall, loop: asyncio.AbstractEventLoop):
        self.status = 0  # before the answer begins
        self._send = send
        self._call = call
        self._loop = loop

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = self._call.headers(self._loop.time())
            message["headers"] = [*message.get("headers", ()), *headers]
        await self._send(message)


def _begin_call(scope: Any, send: Any, loop: asyncio.AbstractEventLoop) -> HttpCall:
    """Makes the HttpCall of a request, which is in its scope from here on."""
    task = asyncio.current_task()
    assert task is not None
    of_connection = scope.setdefault("state", {})
    call = of_connection["call"] = HttpCall(
        new_request_id(scope["headers"]),
        loop.time(),
        task,
        scope["path"],
        disconnected=of_connection.get("disconnected"),
        send=send,
        chunk_writer=of_connection.get("chunk_writer"),
    )
    return call


class App:
    """Wraps the router: gives each request its HttpCall, checks the key, and converts exceptions to
    responses in the format of the API.
    """

    def __init__(self, state: ServerState, router: Router):
        self.state = state
        self._router = router
        config = state.server_config
        self._cross_site = CrossSite(
            config.allowed_hosts, config.allowed_origins, has_keys=state.keys.are_required
        )
        self._routes = [route for route in router.routes if isinstance(route, Route)]
        self._paths = {route.endpoint: route.path for route in self._routes}
        # Paths without parameters are looked up directly: the router, which tries one route after
        # the other, and its wrappers would take longer than most handlers.
        self._endpoints = {
            (method, route.path): route.endpoint
            for route in self._routes
            if "{" not in route.path
            for method in route.methods or ()
        }

    def endpoint(self, method: str, path: str) -> Any:
        """Returns the handler of a path without parameters. Raises ApiError 404."""
        found = self._endpoints.get((method, path))
        if found is None:
            raise from_status(404, path[:200], method, self._paths.values())
        return found

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._router(scope, receive, send)  # lifespan; refuses WebSockets
        if scope["path"].startswith(root := self.state.server_config.root_path) and root:
            if scope["path"] == root:  # the page's URLs are relative to its folder
                return await RedirectResponse(root + "/")(scope, receive, send)
            if scope["path"][len(root)] == "/":
                scope["path"] = scope["path"][len(root) :]
        loop = asyncio.get_running_loop()
        call = _begin_call(scope, send, loop)
        # The entry makes starlette's routes raise their errors, which _answer_error converts to the
        # format of the API.
        scope["app"] = self
        answer = AnswerSender(send, call, loop)
        self.state.meters.http_began()
        try:
            await self._answer(scope, receive, answer, call)
        except asyncio.CancelledError:
            if not call.is_disconnected:
                raise
            call.task.uncancel()
        except ENDS:
            raise
        except BaseException as error:
            await self._answer_error(error, scope, receive, answer)
        finally:
            self._end_call(scope, call, answer.status, loop)

    async def _answer(self, scope: Any, receive: Any, send: AnswerSender, call: HttpCall) -> None:
        self._cross_site.check(scope)
        call.tenant = self.state.keys.check(scope)
        call.weight = self.state.keys.weight(call.tenant)
        call.deadline = read_deadline(scope["headers"])
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._router(scope, receive, send)
        else:
            scope["endpoint"] = endpoint
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

    def _end_call(
        self, scope: Any, call: HttpCall, status: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        if call.watcher is not None:
            call.watcher.cancel()
        if call.num_body_bytes >= LARGE_BODY:
            loop.run_in_executor(None, trim_heap)
        duration_s = loop.time() - call.began
        status = CLIENT_LEFT if call.is_disconnected else status
        route = self._paths.get(scope.get("endpoint"), "other")
        self.state.meters.http_ended(
            scope["method"], route, status, duration_s, call.num_body_bytes
        )
        if self._is_logged(scope["path"]):
            log_access(scope, status, duration_s)

    def _is_logged(self, path: str) -> bool:
        config = self.state.server_config
        return config.access_log and (config.access_log_polls or path not in POLLS)

    async def _answer_error(
        self, error: BaseException, scope: Any, receive: Any, send: AnswerSender
    ) -> None:
        if isinstance(error, HTTPException):
            refusal = from_status(
                error.status_code, scope["path"][:200], scope["method"], self._paths.values()
            )
            headers = self._allow(scope) if error.status_code == 405 else dict(error.headers or {})
        else:
            request = f"{scope['method']} {scope['path']}"
            refusal = self.state.explain(error, request, scope["state"]["call"].request_id)
            headers = {}
        if send.status:
            raise error  # too late for an error response: the connection ends
        await JsonAnswer(refusal.body(scope["path"]), refusal.status, headers | refusal.headers())(
            scope, receive, send
        )

    def _allow(self, scope: Any) -> dict[str, str]:
        """Returns all methods of the path: the router reports only those of its first route."""
        path = next(r.path for r in self._routes if r.matches(scope)[0] is not Match.NONE)
        methods = {method for r in self._routes if r.path == path for method in r.methods or ()}
        return {"allow": ", ".join(sorted(methods))}
