"""The server's OpenAPI 3.1 description, generated from the route table and the Structs of bodies
and responses.

Must not know: what a route does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from .errors import AnthropicError, ApiError, Error, OllamaError
from .reference import HEADERS, reference_page
from .sse import JsonAnswer

EVENTS, LINES = "text/event-stream", "application/x-ndjson"  # media types of streams
REFERENCE = "#/components/schemas/{name}"
PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")  # of a path, with starlette's converter


class ApiRoute(Route):
    """A route with the types of its body and response, for the description of the API.

    It takes POST if it has a body and GET if not, unless `methods` says otherwise. `answer` is the
    type of a successful response; None leaves it out of the description. `streams` is the media
    type of the response if the body sets `stream`. The first line of the handler's docstring is the
    title.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Any],
        *,
        methods: Sequence[str] = (),
        body: Any = None,
        answer: Any = None,
        streams: str | None = None,
    ):
        super().__init__(path, endpoint, methods=methods or ["GET" if body is None else "POST"])
        self.body = body
        self.answer = answer
        self.streams = streams

    def with_endpoint(self, endpoint: Callable[[Request], Any]) -> ApiRoute:
        """Returns the same route with another handler, which has this one's title."""
        return ApiRoute(
            self.path,
            wraps(self.endpoint)(endpoint),
            methods=list(self.methods or ()),
            body=self.body,
            answer=self.answer,
            streams=self.streams,
        )


def description_routes(routes: list[ApiRoute], version: str, root_path: str = "") -> list[ApiRoute]:
    """Returns the routes /openapi.json, which describes `routes` below `root_path`, and /docs, the
    same as a page. Both are generated on first use.
    """

    @cache
    def document() -> dict[str, Any]:
        return describe([*routes, *own], version, root_path)

    async def description(request: Request) -> Response:
        """This description"""
        return JsonAnswer(document())

    async def docs(request: Request) -> Response:
        """This description as a page"""
        return HTMLResponse(reference_page(document()), headers=HEADERS)

    own = [ApiRoute("/openapi.json", description), ApiRoute("/docs", docs)]
    return own


def describe(routes: Sequence[ApiRoute], version: str, root_path: str = "") -> dict[str, Any]:
    """Returns the whole document."""
    types = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [*types, Error, AnthropicError, OllamaError], ref_template=REFERENCE
    )
    schema_of = dict(zip(map(id, types), schemas, strict=False))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operations = paths.setdefault(PARAMETER.sub(r"{\1}", route.path), {})
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            operations[method.lower()] = _operation(route, method, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": version,
            "description": "An LLM inference server with the APIs of OpenAI, Anthropic and Ollama.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: ApiRoute, method: str, schema_of: dict[int, Any]) -> dict[str, Any]:
    summary = (route.endpoint.__doc__ or route.name).strip().splitlines()[0]
    error = type(ApiError(500, "").in_format(route.path))
    failure = {
        "description": "What was wrong.",
        "content": _json({"$ref": REFERENCE.format(name=error.__name__)}),
    }
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path.lower())}",
    }
    if names := PARAMETER.findall(route.path):
        operation["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
            for name in names
        ]
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": _json(schema_of[id(route.body)]),
        }
    content: dict[str, Any] = {}
    if route.answer is not None:
        content = _json(schema_of[id(route.answer)])
    if route.streams:
        content[route.streams] = {}
    operation["responses"] = {
        "200": {"description": "Success."} | ({"content": content} if content else {}),
        "4XX": failure,
        "5XX": failure,
    }
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
