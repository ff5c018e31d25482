"""The application around the routes, over HTTP: ids, errors in shape, headers."""

import inspect

import httpx2 as httpx
from quire.frontend.server.app import make_app
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


def test_what_is_looked_up_is_what_the_router_would_find() -> None:
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
