"""The application around the routes, over HTTP: ids, error formats, headers."""

import asyncio
import inspect
import logging
import re
import time
from typing import Any

import httpx2 as httpx
import pytest
from quire.frontend.server.app import POLLS, make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.state import ServerState
from quire.tests.frontend.server.scripted import (
    EngineError,
    ScriptedEngine,
    post,
    scripted_app,
    talk,
)
from starlette.routing import Match


def test_every_answer_has_an_id(server: httpx.Client) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        assert server.get(path).headers["x-request-id"].startswith("req-")
    assert (
        server.get("/v1/models", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    )


def test_every_answer_says_how_long_it_took(server: httpx.Client) -> None:
    body = {"prompt": "The sun", "max_tokens": 16, "ignore_eos": True}

    def took_ms(method: str, path: str, body: Any = None) -> int:
        text = server.request(method, path, json=body).headers["openai-processing-ms"]
        assert re.fullmatch("[0-9]+", text)
        return int(text)

    for path in ("/health", "/v1/models", "/nowhere"):
        took_ms("GET", path)
    took_ms("POST", "/v1/completions", {"prompt": 1})
    took_ms("POST", "/v1/completions", body | {"stream": True})
    began = time.perf_counter()
    shown = took_ms("POST", "/v1/completions", body | {"n": 8})
    assert 0 < shown <= 1000 * (time.perf_counter() - began) + 1


class PanicException(BaseException):
    """As libraries in Rust raise it: it is no Exception."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": ["a"] * 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
        ("/api/chat", {"model": "bundled", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a " * 50_000}),
    ],
)
def test_a_tokenizer_that_panics_is_an_error_of_the_api(
    path: str, body: dict[str, Any], monkeypatch, caplog
) -> None:
    engine = ScriptedEngine(["a"])

    def panic(*_: object, **__: object) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(engine.tokenizer, "encode", panic)
    monkeypatch.setattr(engine.tokenizer, "encode_batch", panic)
    answer = post(scripted_app(engine), path, body)
    check_internal_error(path, answer.status_code, answer.json())
    assert "unwrap" not in answer.text and "unwrap" in caplog.text
    assert answer.headers["x-request-id"] in caplog.text


def check_internal_error(path: str, status: int, answer: dict[str, Any]) -> None:
    """The error has the form of the API of `path`."""
    assert status == 500
    if path.startswith("/api/"):
        assert "Its log has the cause" in answer["error"]
    elif path == "/v1/messages":
        assert answer["type"] == "error" and answer["error"]["type"] == "api_error"
    else:
        assert answer["error"]["code"] == "internal_error"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_panic_during_an_answer_ends_only_that_answer(n: int, stream: bool, caplog) -> None:
    app = scripted_app(ScriptedEngine(["a", PanicException("unwrap")]))
    body = {"messages": [{"role": "user", "content": "a"}], "n": n, "stream": stream}
    answer = post(app, "/v1/chat/completions", body)
    assert '"code":"internal_error"' in answer.text.replace('": "', '":"')
    assert answer.headers["x-request-id"] in caplog.text and "unwrap" in caplog.text
    assert talk(app, lambda client: client.get("/health")).status_code == 200


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


CHAT = {"messages": [{"role": "user", "content": "Hi."}]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("piece", [RuntimeError("a bug"), EngineError("a bug")], ids=["bug", "row"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi."}),
        ("/v1/responses", {"input": "Hi."}),
        ("/v1/messages", CHAT | {"max_tokens": 5}),
        ("/api/chat", CHAT),
    ],
)
def test_an_internal_error_has_a_line_in_the_log_under_its_id(path, body, piece, stream, caplog):
    """Whether something is raised or the engine ends the request, before or within a stream."""
    app = scripted_app(ScriptedEngine(["a", piece] if stream else [piece]))
    asked = body | {"stream": stream} | ({"model": app.state.model_name} if "api" in path else {})
    answer = post(app, path, asked, **{"x-request-id": "mine"})
    assert answer.status_code == (200 if stream else 500) and "Its log has the cause" in answer.text
    (line,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "failed (mine)" in line.getMessage()
    assert "a bug" in f"{line.getMessage()} {line.exc_info}"
