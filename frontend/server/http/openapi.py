"""The server's OpenAPI 3.1 description, generated from the route table and the Structs of bodies
and responses.

Must not know: what a route does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from .errors import AnthropicError, ApiError, Error, OllamaError
from .reference import HEADERS, reference_page
from .sse import Json

REFERENCE = "#/components/schemas/{name}"
PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")  # of a path, with starlette's converter


@dataclass(frozen=True)
class Description:
    """What the description says of a handler.

    `answer`: the type of a successful response; None: not described. `streams`: the media type of
    the response if the body sets `stream`.
    """

    body: Any = None
    answer: Any = None
    streams: str | None = None


def described(
    body: Any = None, answer: Any = None, *, streams: bool | str = False
) -> Callable[[Any], Any]:
    """Decorates a handler with the types of its body and response.

    The first line of the handler's docstring is the title.
    """

    def note(handler: Any) -> Any:
        handler.description = Description(
            body, answer, "text/event-stream" if streams is True else streams or None
        )
        return handler

    return note


def description_routes(routes: list[Route], version: str, root_path: str = "") -> list[Route]:
    """The routes /openapi.json, which describes `routes` below `root_path`, and /docs, the same as
    a page. Both are generated on first use.
    """

    @cache
    def document() -> dict[str, Any]:
        return describe([*routes, *own], version, root_path)

    @described()
    async def description(request: Request) -> Response:
        """This description"""
        return Json(document())

    @described()
    async def docs(request: Request) -> Response:
        """This description as a page"""
        return HTMLResponse(reference_page(document()), headers=HEADERS)

    own = [
        Route("/openapi.json", description, methods=["GET"]),
        Route("/docs", docs, methods=["GET"]),
    ]
    return own


def describe(routes: Iterable[Route], version: str, root_path: str = "") -> dict[str, Any]:
    """Returns the whole document.

    Routes whose handlers are not decorated are listed by path and method only.
    """
    routes = list(routes)
    descriptions = [getattr(route.endpoint, "description", Description()) for route in routes]
    types = [
        kind
        for description in descriptions
        for kind in (description.body, description.answer)
        if kind is not None
    ]
    schemas, components = msgspec.json.schema_components(
        [*types, Error, AnthropicError, OllamaError], ref_template=REFERENCE
    )
    schema_of = dict(zip(map(id, types), schemas, strict=False))
    paths: dict[str, dict[str, Any]] = {}
    for route, description in zip(routes, descriptions, strict=True):
        operations = paths.setdefault(PARAMETER.sub(r"{\1}", route.path), {})
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            operations[method.lower()] = _operation(route, method, description, schema_of)
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


def _operation(
    route: Route, method: str, description: Description, schema_of: dict[int, Any]
) -> dict[str, Any]:
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
    if description.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": _json(schema_of[id(description.body)]),
        }
    content: dict[str, Any] = {}
    if description.answer is not None:
        content = _json(schema_of[id(description.answer)])
    if description.streams:
        content[description.streams] = {}
    operation["responses"] = {
        "200": {"description": "Success."} | ({"content": content} if content else {}),
        "4XX": failure,
        "5XX": failure,
    }
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
