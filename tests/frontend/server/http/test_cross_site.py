"""Web pages of other sites: what they can send, over loopback and elsewhere, with and without keys.
CORS for allowed origins.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import pytest
from quire.frontend.server.app import make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.cross_site import CrossSite
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.state import ServerState
from quire.tests.frontend.server.conftest import running_server, slow_engine

EVIL = "http://evil.example"
COMPLETION = b'{"prompt": [1, 2], "max_tokens": 1}'


def verdict(
    headers: dict[str, str],
    method: str = "POST",
    server: str = "127.0.0.1",
    allowed_hosts: tuple[str, ...] = (),
    allowed_origins: tuple[str, ...] = (),
    has_keys: bool = False,
    path: str = "/v1/completions",
) -> str | None:
    """Return the code of the refusal, or None."""
    scope = {
        "method": method,
        "path": path,
        "server": (server, 8000),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    try:
        CrossSite(allowed_hosts, allowed_origins, has_keys=has_keys).check(scope)
    except ApiError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000",
        "LOCALHOST",
        "app.localhost:8000",
        "host.docker.internal:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "0.0.0.0:8000",
        "192.168.1.5",
        "",
    ],
)
def test_hosts_of_this_machine(host: str) -> None:
    assert verdict({"host": host}) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "evillocalhost",
        "[::1",
        "/",
    ],
)
def test_foreign_hosts(host: str) -> None:
    assert verdict({"host": host}) == verdict({"host": host}, "GET") == "host_not_allowed"
    assert verdict({"host": host}, server="::ffff:127.0.0.1") == "host_not_allowed"
    # Other addresses expect a name, and with a key the page cannot do anything.
    assert verdict({"host": host}, server="192.168.1.5") is None
    assert verdict({"host": host}, has_keys=True) is None


def test_allowed_hosts() -> None:
    named = {"allowed_hosts": ("llm.example", "*.corp.example")}
    for host in ("llm.example:8000", "LLM.example", "a.corp.example", "localhost"):
        assert verdict({"host": host}, **named) is None
    for host in ("evil.example", "corp.example", "xllm.example"):
        assert verdict({"host": host}, **named) == "host_not_allowed"
        # The list applies to every address, with keys too.
        assert verdict({"host": host}, server="10.0.0.1", has_keys=True, **named) is not None
    assert verdict({"host": "evil.example"}, allowed_hosts=("*",)) is None


OWN = {"host": "localhost:8000"}


@pytest.mark.parametrize(
    ("headers", "method", "code"),
    [
        ({}, "POST", None),  # a program
        ({"origin": "http://localhost:8000"}, "POST", None),  # the page at /
        ({"origin": "https://localhost:8000"}, "POST", None),  # behind a proxy with TLS
        ({"origin": EVIL}, "POST", "origin_not_allowed"),
        ({"origin": EVIL}, "GET", "origin_not_allowed"),
        ({"origin": EVIL}, "OPTIONS", "origin_not_allowed"),
        ({"origin": "null"}, "POST", "origin_not_allowed"),  # file://, a sandboxed frame
        ({"origin": "http://localhost:3000"}, "POST", "origin_not_allowed"),
        ({"origin": "http://localhost:8000.evil.example"}, "POST", "origin_not_allowed"),
        ({"sec-fetch-site": "cross-site"}, "POST", "origin_not_allowed"),
        ({"sec-fetch-site": "same-site"}, "POST", "origin_not_allowed"),
        ({"sec-fetch-site": "same-origin"}, "POST", None),
        ({"sec-fetch-site": "cross-site"}, "GET", None),  # a link to the page at /
    ],
)
def test_origins(headers: dict[str, str], method: str, code: str | None) -> None:
    assert verdict(OWN | headers, method) == code
    assert verdict(OWN | headers, method, server="192.168.1.5") is None
    assert verdict(OWN | headers, method, has_keys=True) is None


def test_allowed_origins() -> None:
    headers = OWN | {"origin": "https://app.example", "content-type": "application/json"}
    assert verdict(headers, allowed_origins=("https://app.example/",)) is None
    assert verdict(headers, allowed_origins=("*",)) is None
    assert verdict(headers, allowed_origins=("https://b.example",)) == "origin_not_allowed"


@pytest.mark.parametrize(
    ("kind", "from_a_program", "from_a_browser"),
    [
        (None, None, None),
        ("application/json", None, None),
        ("application/json; charset=utf-8", None, None),
        ("application/x-www-form-urlencoded", None, "unsupported_media_type"),  # curl -d
        ("text/plain", "unsupported_media_type", "unsupported_media_type"),
        ("Text/Plain;charset=UTF-8", "unsupported_media_type", "unsupported_media_type"),
        ("multipart/form-data; boundary=x", "unsupported_media_type", "unsupported_media_type"),
    ],
)
def test_content_types(
    kind: str | None, from_a_program: str | None, from_a_browser: str | None
) -> None:
    headers = OWN | ({"content-type": kind} if kind else {})
    assert verdict(headers) == from_a_program
    assert verdict(headers | {"origin": "http://localhost:8000"}) == from_a_browser
    assert verdict(headers | {"sec-fetch-site": "same-origin"}) == from_a_browser


def test_a_program_may_upload_a_file_and_a_page_may_not() -> None:
    headers = OWN | {"content-type": "multipart/form-data; boundary=x"}
    assert verdict(headers, path="/v1/files") is None
    page = headers | {"sec-fetch-site": "same-origin"}
    assert verdict(page, path="/v1/files") == "unsupported_media_type"
    assert verdict(headers, path="/v1/files/1") == "unsupported_media_type"
    plain = OWN | {"content-type": "text/plain"}
    assert verdict(plain, path="/v1/files") == "unsupported_media_type"


def test_no_page_can_use_a_server_without_keys() -> None:
    """Completions, the list of requests, and with --admin pause and sleep."""
    with (
        slow_engine(0.0) as (address, _),
        running_server("--engine", address, "--admin") as client,
    ):
        attacks: list[dict[str, Any]] = [
            {"headers": {"host": "evil.example"}},
            {"headers": {"origin": EVIL}},
            {"headers": {"content-type": "text/plain"}},
        ]
        for attack in attacks:
            for path in ("/v1/completions", "/pause", "/sleep"):
                answer = client.post(path, content=COMPLETION, **attack)
                assert answer.status_code in (403, 415), (path, attack)
                assert answer.headers["x-request-id"] and answer.json()["error"]["code"]
            if "content-type" not in attack["headers"]:
                assert client.get("/v1/requests", **attack).status_code == 403
                assert client.get("/", **attack).status_code == 403
        assert client.get("/is_paused").json() == {"is_paused": False}
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        assert client.get("/v1/requests").json()["data"] == []
        form = {"content-type": "application/x-www-form-urlencoded"}  # curl -d
        assert client.post("/v1/completions", content=COMPLETION, headers=form).status_code == 200


# ---------------------------------------------------------------- CORS

PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def send_request(method: str, headers: dict[str, str], **config: Any) -> httpx.Response:
    app = make_app(ServerState(ServerConfig(**config), "m"))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, "/health", headers=headers)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("allowed", "shown"),
    [
        ("*", "*"),
        ("https://a.example", "https://a.example"),
        ("https://a.example/", "https://a.example"),
    ],
)
def test_an_allowed_origin(allowed: str, shown: str) -> None:
    origin = {"origin": "https://a.example"}
    answer = send_request("GET", origin, allowed_origins=[allowed])
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == shown
    assert "Origin" in answer.headers["vary"] or shown == "*"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    # A preflight has no key.
    answer = send_request("OPTIONS", origin | PREFLIGHT, allowed_origins=[allowed], api_key=["k"])
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == shown
    granted = answer.headers["access-control-allow-headers"]
    assert granted == PREFLIGHT["access-control-request-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]


def test_another_origin() -> None:
    origin = {"origin": "https://b.example"}
    answer = send_request("OPTIONS", origin | PREFLIGHT, allowed_origins=["https://a.example"])
    assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
    answer = send_request("GET", origin, allowed_origins=["https://a.example"])
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    answer = send_request("GET", origin, allowed_origins=["https://a.example"], api_key=["k"])
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
