"""Cors: preflights and headers, for origins that may and others."""

import asyncio
import json

import pytest
from quire.frontend.server.app import make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.cors import Cors
from quire.frontend.server.state import ServerState

PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def ask(method: str, headers: dict[str, str], *allowed: str) -> tuple[int, dict[str, str], bytes]:
    """The answer of an app that says 200."""
    sent = []

    async def app(scope, receive, send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/plain")],
            }
        )
        await send({"type": "http.response.body", "body": b"app"})

    async def send(message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": "/v1/models",
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }
    asyncio.run(Cors(app, list(allowed))(scope, None, send))
    start, body = sent
    return start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, body["body"]


@pytest.mark.parametrize(
    ("allowed", "shown"),
    [
        ("*", "*"),
        ("https://a.example", "https://a.example"),
        ("https://a.example/", "https://a.example"),
    ],
)
def test_an_origin_that_may(allowed: str, shown: str) -> None:
    status, headers, body = ask("GET", {"origin": "https://a.example"}, allowed)
    assert (
        (status, body) == (200, b"app")
        and headers["access-control-allow-origin"] == shown
        and headers["vary"] == "Origin"
    )
    assert "x-request-id" in headers["access-control-expose-headers"]
    status, headers, body = ask("OPTIONS", {"origin": "https://a.example", **PREFLIGHT}, allowed)
    assert (status, body) == (204, b"") and headers["access-control-allow-origin"] == shown
    assert (
        headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        and "POST" in headers["access-control-allow-methods"]
    )
    assert headers["x-request-id"].startswith("req-")


def test_an_origin_that_may_not() -> None:
    status, headers, body = ask("GET", {"origin": "https://b.example"}, "https://a.example")
    assert (
        (status, body) == (200, b"app")
        and "access-control-allow-origin" not in headers
        and headers["vary"] == "Origin"
    )
    status, headers, body = ask(
        "OPTIONS", {"origin": "https://b.example", **PREFLIGHT}, "https://a.example"
    )
    assert (
        status == 403
        and json.loads(body)["error"]["code"] == "origin_not_allowed"
        and "access-control-allow-origin" not in headers
    )


def test_what_is_none_of_its_business() -> None:
    assert ask("GET", {}, "*")[1] == {"content-type": "text/plain"}
    assert ask("OPTIONS", {"origin": "https://a.example"}, "*")[2] == b"app"  # no preflight


def test_it_stands_around_the_app_only_where_it_is_asked_for() -> None:
    assert not isinstance(make_app(ServerState(ServerConfig(), "m")), Cors)
    # outside: a preflight has no key
    assert isinstance(
        make_app(ServerState(ServerConfig(allowed_origins=["*"], api_key=["k"]), "m")), Cors
    )
