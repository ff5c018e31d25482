"""The application around the routes, over HTTP: ids, error formats, headers."""

import asyncio
import inspect
import logging
import re
from typing import Any

import httpx2 as httpx
import pytest
from quire.frontend.server.app import POLLS, make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.state import ServerState
from starlette.routing import Match


def test_every_answer_has_an_id(server: httpx.Client) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        assert server.get(path).headers["x-request-id"].startswith("req-")
    assert (
        server.get("/v1/models", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    )


def test_unknown_routes_and_methods(server: httpx.Client) -> None:
    answer = server.get("/v1/nowhere")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"
    answer = server.put("/v1/models")
    assert (
        answer.status_code == 405
        and answer.json()["error"]["code"] == "method_not_allowed"
        and "GET" in answer.headers["allow"]
    )
    answer = server.put("/v1/responses/resp_1")  # two routes
    assert answer.headers["allow"] == "DELETE, GET, HEAD"


def test_the_lookup_agrees_with_the_router() -> None:
    app = make_app(ServerState(ServerConfig(admin=True), "a model"))
    assert ("POST", "/v1/chat/completions") in app._endpoints and (
        "HEAD",
        "/v1/models",
    ) in app._endpoints
    for (method, path), endpoint in app._endpoints.items():
        scope = {"type": "http", "method": method, "path": path}
        assert (
            next(
                route for route in app._router.routes if route.matches(scope)[0] is Match.FULL
            ).endpoint
            is endpoint
        )
        assert inspect.iscoroutinefunction(endpoint)


def test_unknown_parameters_are_named_in_a_header(server: httpx.Client) -> None:
    body = {"prompt": "The sun", "max_tokens": 1, "colour": "red", "shape": 1}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 200 and answer.headers["x-unknown-params"] == "colour,shape"


def access_lines(caplog: pytest.LogCaptureFixture, *paths: str, **config: Any) -> list[str]:
    """Return the access log after a GET of each path, each by a client with its own address."""
    caplog.clear()
    caplog.set_level(logging.INFO, "quire.access")
    app = make_app(ServerState(ServerConfig(**config), "m"))

    async def get(path: str, client: tuple[str, int] | None) -> None:
        transport = httpx.ASGITransport(app, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as session:
            await session.get(path, headers={"x-request-id": "mine"})

    addresses = [("127.0.0.1", 5001), ("::1", 5002), None]
    for i, path in enumerate(paths):
        asyncio.run(get(path, addresses[i % len(addresses)]))
    return [record.getMessage() for record in caplog.records]


def test_the_access_log_has_the_client_and_omits_polls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = access_lines(caplog, "/version", "/nowhere", "/v1/models")
    shown = [re.sub(r"[0-9.]+ ms", "N ms", line) for line in lines]
    assert shown == [
        "127.0.0.1:5001 GET /version 200 N ms mine",
        "[::1]:5002 GET /nowhere 404 N ms mine",
        "unix GET /v1/models 503 N ms mine",
    ]
    fields = caplog.records[0].fields
    assert fields.pop("duration_ms") >= 0 and fields == {
        "client": "127.0.0.1:5001",
        "method": "GET",
        "path": "/version",
        "status": 200,
        "request_id": "mine",
    }
    polls = sorted(POLLS)
    assert access_lines(caplog, *polls) == []
    assert len(access_lines(caplog, *polls, access_log_polls=True)) == len(polls)
    assert access_lines(caplog, "/version", access_log=False) == []
