"""API keys: accepted headers, and routes that need no key."""

import asyncio

import httpx2 as httpx
import pytest
from quire.frontend.server.app import all_routes, make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.auth import ApiKeys
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.state import ServerState
from quire.ipc.errors import InvalidParameterError
from quire.tests.frontend.server.conftest import running_server, slow_engine


def scope(path: str = "/v1/models", **headers: str) -> dict:
    return {
        "path": path,
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ],
    }


def test_without_keys_all_requests_have_one_tenant() -> None:
    assert ApiKeys(ServerConfig()).check(scope()) == ""


def test_each_key_is_a_tenant_in_either_header() -> None:
    keys = ApiKeys(ServerConfig(api_key=["one", "two"]))
    tenants = {keys.check(scope(authorization="Bearer one")), keys.check(scope(x_api_key="two"))}
    assert len(tenants) == 2 and not any("one" in tenant or "two" in tenant for tenant in tenants)
    assert keys.check(scope(authorization="bearer one")) in tenants


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "one"},
        {"authorization": "Bearer "},
        {"x_api_key": "one "[:2]},
    ],
)
def test_other_headers_are_refused(headers: dict) -> None:
    with pytest.raises(ApiError) as caught:
        ApiKeys(ServerConfig(api_key=["one"])).check(scope(**headers))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_health_needs_no_key() -> None:
    keys = ApiKeys(ServerConfig(api_key=["one"]))
    assert keys.check(scope("/health")) == keys.check(scope("/health/ready")) == ""


def test_keys_from_a_file(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\none\n\n two  # the second\n")
    keys = ApiKeys(ServerConfig(api_key_file=str(path)))
    assert keys.check(scope(x_api_key="two"))
    for content in ("", "# nothing\n"):
        path.write_text(content)
        with pytest.raises(InvalidParameterError, match="api_key_file"):
            ApiKeys(ServerConfig(api_key_file=str(path)))
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        ApiKeys(ServerConfig(api_key_file=str(tmp_path / "none")))


def test_weights_from_a_file(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("one weight=3  # ours\ntwo\n")
    keys = ApiKeys(ServerConfig(api_key_file=str(path), api_key=["three"]))
    weights = [keys.weight(keys.check(scope(x_api_key=key))) for key in ("one", "two", "three")]
    assert weights == [3.0, 1.0, 1.0] and keys.weight("") == 1.0
    for options in ("weight=0", "weight=much", "weight=nan", "wait=1", "weight=1 weight=2"):
        path.write_text(f"zero\none {options}\n")
        with pytest.raises(InvalidParameterError, match="api_key_file, line 2"):
            ApiKeys(ServerConfig(api_key_file=str(path)))


def test_a_key_in_the_url_is_ignored_and_the_error_says_why() -> None:
    keys = ApiKeys(ServerConfig(api_key=["one"]))
    for query in (b"api_key=one", b"a=b&key=one", b"API-KEY=one", b"access_token=one"):
        with pytest.raises(ApiError, match="URL"):
            keys.check(scope() | {"query_string": query})
    assert keys.check(scope(authorization="Bearer one") | {"query_string": b"api_key=two"})


def status_of(app, method: str, path: str) -> int:
    sent = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(
        app(
            {
                "type": "http",
                "method": method,
                "path": path,
                "raw_path": path.encode(),
                "query_string": b"",
                "headers": [],
            },
            receive,
            send,
        )
    )
    return sent[0]["status"]


def test_every_route_except_health_needs_a_key() -> None:
    """Iterates over the route table, so a new route is covered."""
    state = ServerState(ServerConfig(api_key=["one"], access_log=False, admin=True), "m")
    app, table = make_app(state), all_routes(state)
    open_routes = {
        (method, route.path)
        for route in table
        for method in route.methods
        if status_of(app, method, route.path.replace("{", "").replace("}", "")) != 401
    }
    paths = ("/", "/docs", "/health", "/health/ready", "/ping")
    assert open_routes == {(m, path) for m in ("GET", "HEAD") for path in paths} | {
        ("POST", "/ping")
    }
    # unknown paths are not revealed either
    assert len(table) > 20 and status_of(app, "GET", "/nowhere") == 401


def test_tenants_over_http() -> None:
    """Their caches are separate, and no key is logged."""
    flags = ("--api-key", "secret-one", "--api-key", "secret-two", "--salt-per-key")
    with slow_engine(0.0) as (address, _), running_server("--engine", address, *flags) as client:

        def num_cached(key: str) -> int:
            body = {"prompt": list(range(1, 64)), "max_tokens": 1}
            answer = client.post(
                "/v1/completions?api_key=secret-one",
                json=body,
                headers={"authorization": f"Bearer {key}"},
            )
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [
            num_cached(key) for key in ("secret-one", "secret-two", "secret-one", "secret-two")
        ] == [0, 0, 48, 48]
        for headers in ({}, {"authorization": "Bearer secret-three"}, {"x-api-key": "secret-four"}):
            assert client.get("/v1/models?key=secret-five", headers=headers).status_code == 401
        assert client.get("/health").status_code == 200
        assert "secret" not in client.log()


def test_a_flood_by_one_key_does_not_hold_up_another() -> None:
    """Another key's requests, one after the other, all end while most of the flood is unfinished.
    In order of arrival the first of them would end after the flood.
    """
    flags = ("--api-key", "one", "--api-key", "two", "--max-concurrent-requests", "32")

    async def flood(base_url: str) -> int:
        async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:

            async def post(key: str, first: int) -> None:
                body = {"prompt": [first, 1, 2], "max_tokens": 20 if key == "one" else 2}
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text

            tasks = [asyncio.ensure_future(post("one", i)) for i in range(40)]
            while not any(task.done() for task in tasks):
                await asyncio.sleep(0.01)
            for i in range(5):
                await post("two", i)
            num_done = sum(task.done() for task in tasks)
            await asyncio.gather(*tasks)
            return num_done

    with slow_engine(0.01, max_num_seqs=4) as (address, _):
        with running_server("--engine", address, *flags) as client:
            assert asyncio.run(flood(str(client.base_url))) <= 20
