"""The error table: one row per kind of invalid request, over all routes, with the session's server.

The rows are in error_rows/, by API. Errors that need a separate server (keys, queues, loading,
draining): test_auth, test_leaving, test_serving. Input that is not HTTP: test_protocol.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2 as httpx
import pytest
from quire.frontend.server.app import all_routes
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.errors import TYPES
from quire.frontend.server.state import ServerState
from quire.tests.frontend.server.error_rows import (
    bodies,
    chat,
    completions,
    messages,
    ollama,
    other,
    responses,
    text,
)
from quire.tests.frontend.server.error_rows.bodies import C, M, R, T
from starlette.routing import Match

INTERNAL = re.compile(
    r"0x[0-9a-f]{6,}|Traceback|File "
    r"\"|site-packages|\.py\b|(?<![\w.])/(?:root|home|usr|tmp|work|opt|var|proc)/"
)


ROWS = [
    (method, path, *row)
    for module in (completions, chat, responses, messages, ollama, text, other)
    for (method, path), rows in module.ROWS.items()
    for row in rows
]


def send(server: httpx.Client, method: str, path: str, body: Any, **headers: str) -> httpx.Response:
    raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    return server.request(method, path, content=raw, headers=headers)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param", "code", "piece"),
    ROWS,
    ids=[f"{n}{row[1]}" for n, row in enumerate(ROWS)],
)
def test_row(
    server: httpx.Client,
    method: str,
    path: str,
    body: Any,
    status: int,
    param: str | None,
    code: str | None,
    piece: str,
) -> None:
    answer = send(server, method, path, body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    assert not INTERNAL.search(answer.text.replace(path, "")), answer.text
    found, kind = answer.json(), TYPES.get(status, "invalid_request_error")
    if path.startswith("/api/"):
        assert found.keys() == {"error"} and piece in found["error"]
    elif path.startswith(M):
        assert found.keys() - {"request_id"} == {"type", "error"} and found["type"] == "error"
        assert (
            found["error"].keys() == {"type", "message"}
            and found["error"]["type"] == kind
            and piece in found["error"]["message"]
        )
    else:
        assert found.keys() == {"error"}
        assert found["error"] | {"message": ""} == {
            "message": "",
            "type": kind,
            "param": param,
            "code": code,
        }
        assert piece in found["error"]["message"]


def test_an_invalid_streamed_request_is_refused_the_same_way(server: httpx.Client) -> None:
    for method, path, body, status, *_ in ROWS:
        if (
            path in (T, C, R)
            and isinstance(body, dict)
            and status == 400
            and "stream" not in body
            and "stream_options" not in body
        ):
            plain, streamed = (
                send(server, method, path, body),
                send(server, method, path, body | {"stream": True}),
            )
            if "best_of" not in body:
                assert (streamed.status_code, streamed.json()) == (
                    plain.status_code,
                    plain.json(),
                ), body


def test_every_route_has_a_row() -> None:
    """Iterates over the route table, so a new route is covered."""
    asked = [(method, path.split("?")[0]) for method, path, *_ in ROWS]
    for route in all_routes(ServerState(ServerConfig(), "m")):
        scopes = [
            {"type": "http", "method": method, "path": path, "headers": []}
            for method, path in asked
        ]
        assert any(route.matches(scope)[0] is not Match.NONE for scope in scopes), (
            f"{route.path} has no row"
        )


ODD_PATHS = (
    "/",
    "/v1/models",
    "/v1/completions",
    "/health",
    "/nowhere",
    "/../../etc/passwd",
    "/%00",
    "/%0d%0aX-Evil: 1",
    "/" + "a" * 3000,
)


@pytest.mark.parametrize("path", ODD_PATHS, ids=lambda path: path[:20])
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PATCH"])
def test_unusual_methods_and_paths(server: httpx.Client, method: str, path: str) -> None:
    answer = server.request(method, path)
    assert (
        answer.status_code in (200, 404, 405)
        and answer.headers["x-request-id"]
        and "x-evil" not in answer.headers
    )
    if method == "HEAD":
        assert answer.content == b"" and int(answer.headers["content-length"]) > 0
    elif answer.status_code != 200:
        assert answer.json()["error"]["code"] in ("unknown_url", "method_not_allowed")


def test_headers_without_effect(server: httpx.Client) -> None:
    """curl declares its body as a form, some clients declare nothing, others accept types that the
    server does not offer.
    """
    for headers in (
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "text/json; charset=utf-8"},
        {"accept": "text/html"},
        {"accept-encoding": "br"},
        {"connection": "Upgrade", "upgrade": "h2c"},
        {"expect": "100-continue"},
        {"te": "trailers"},
        {"x-request-id": "a b"},
    ):
        answer = send(server, "POST", T, bodies.text(), **headers)
        assert answer.status_code == 200 and answer.json()["choices"], headers


def test_unusual_but_valid_texts(server: httpx.Client) -> None:
    for prompt in (
        "\x00",
        "a\x00b",
        "\u202e",
        "\ufeff",
        "\U0010ffff" * 10,
        "\r\n" * 10,
        "<|endoftext|>",
    ):
        answer = send(server, "POST", T, bodies.text(prompt=prompt))
        assert answer.status_code == 200, (prompt, answer.text)
