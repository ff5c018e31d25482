"""Query parameters: numbers are ASCII digits, and few; no route fails on any value."""

import httpx2 as httpx
import pytest
from quire.frontend.server.app import all_routes
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.http.queries import flag, integer, one_of, seconds
from quire.frontend.server.state import ServerState
from starlette.datastructures import QueryParams
from starlette.requests import Request

HOSTILE = ["²", "١", "９", "9" * 5000, "-" + "9" * 5000, "", "-", "+1", "1_0", " 1", "1e3", "nan"]
NAMES = ("limit", "since", "after", "model")


def request_with(query: str) -> Request:
    return Request({"type": "http", "query_string": query.encode(), "headers": []})


def test_an_integer_is_within_its_bounds() -> None:
    def read(query: str) -> int:
        return integer(request_with(query), "limit", default=20, least=1, most=100)

    assert [read(query) for query in ("", "limit=1", "limit=100", "limit=007")] == [20, 1, 100, 7]
    for bad in ("limit=0", "limit=101", "limit=-1"):
        with pytest.raises(ApiError, match="must be an integer from 1 to 100"):
            read(bad)


@pytest.mark.parametrize("text", HOSTILE)
def test_other_texts_are_no_numbers(text: str) -> None:
    query = str(QueryParams({"limit": text}))
    with pytest.raises(ApiError) as caught:
        integer(request_with(query), "limit", default=20, least=-(2**63), most=2**63)
    assert caught.value.param == "limit" and len(caught.value.message) < 200
    for reader in (seconds, flag, one_of("a", "b")):
        with pytest.raises(ApiError):
            reader("name", [text])


def test_no_route_fails_on_a_value_of_a_query(server: httpx.Client) -> None:
    """Routes of --admin are those of the readers above."""
    stored = server.post("/v1/responses", json={"input": "a", "max_output_tokens": 1}).json()["id"]
    routes = all_routes(ServerState(ServerConfig(), "bundled"))
    paths = {route.path for route in routes if "GET" in (route.methods or {"GET"})}
    assert {"/v1/requests", "/v1/engine/state", "/v1/responses/{response_id}/input_items"} <= paths
    for path in paths:
        for name in NAMES:
            for text in ("²", "١", "9" * 5000):
                answer = server.get(path.replace("{response_id}", stored), params={name: text})
                assert answer.status_code < 500, (path, name, text[:10], answer.text)
    listed = server.get(f"/v1/responses/{stored}/input_items", params={"limit": "²"})
    assert listed.status_code == 400 and listed.json()["error"]["param"] == "limit"
