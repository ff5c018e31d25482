"""The engine's state and the timings of requests, over HTTP from a real server."""

import http.client
import json
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server, slow_engine


@pytest.fixture(scope="module")
def slow() -> Iterator[httpx.Client]:
    """A request of some hundred tokens, which takes seconds."""
    with slow_engine(0.01) as (address, _), running_server("--engine", address) as client:
        yield client


def disconnect_while_running(client: httpx.Client, name: str, **body: object) -> dict:
    """Send a request and close the connection after some of its tokens. Return what the engine
    reported of the request at that time.
    """
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port)
    headers = {"content-type": "application/json", "x-request-id": name}
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({"prompt": [1, 2], "max_tokens": 5000, "ignore_eos": True, **body}),
        headers,
    )
    seen: list[dict] = []

    def has_tokens() -> bool:
        seen[:] = [
            request
            for request in client.get("/v1/engine/state").json()["requests"]
            if request["num_output_tokens"]
        ]
        return bool(seen)

    wait_until(has_tokens)
    connection.close()
    return seen[0]


def complete(server: httpx.Client, **more: object) -> httpx.Response:
    answer = server.post(
        "/v1/completions",
        json={"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True, **more},
    )
    assert answer.status_code == 200, answer.text
    return answer


def test_the_load_of_experts(server: httpx.Client) -> None:
    assert server.get("/v1/engine/experts").json() == {"layers": [], "tokens": []}  # has none


def test_the_state_of_the_engine(server: httpx.Client) -> None:
    complete(server, prompt="Once upon a time there was a fox. " * 8)
    state = server.get("/v1/engine/state").json()
    assert (
        state["model"]
        and state["max_model_len"] > 0
        and state["block_size"] > 0
        and state["uptime_s"] > 0
        and state["num_queued"] == 0
    )
    assert len(state["blocks"]) <= min(4096, state["num_blocks"])
    assert sum(state["block_counts"].values()) == state["num_blocks"] - 1
    assert state["num_finished"] > 0 and state["has_chat_template"] is True
    assert set(state["blocks"]) <= set("-.cus") and "c" in state["blocks"]
    assert (
        state["counters"]["num_generation_tokens"] >= 12 and state["steps"][-1][0] == state["step"]
    )
    defaults = state["default_sampling_params"]
    assert defaults["temperature"] == 0.7 and defaults["top_k"] == 50 and defaults["min_p"] == 0.0
    newer = server.get("/v1/engine/state", params={"since": state["step"] - 2}).json()
    assert [step[0] for step in newer["steps"]][:2] == [state["step"] - 1, state["step"]]


@pytest.mark.parametrize("streams", [True, False])
def test_a_request_is_visible_while_it_runs_and_as_an_abort_after_its_client_left(
    slow: httpx.Client, streams: bool
) -> None:
    name = f"left-{streams}"
    seen = disconnect_while_running(slow, name, stream=streams)
    assert slow.get("/v1/engine/state").json()["has_chat_template"] is False
    assert (
        seen["state"] == "running"
        and seen["max_tokens"] == 5000
        and seen["num_computed_tokens"] > 0
    )
    wait_until(lambda: slow.get(f"/v1/requests/{name}").status_code != 404)
    line = slow.get(f"/v1/requests/{name}").json()
    assert (
        seen["request_id"].startswith(line["id"])
        and line["finish_reason"] == "abort"
        and line["x_request_id"] == name
    )
    assert 0 < line["completion_tokens"] < 5000


def test_a_finished_request_has_a_timeline_and_a_trace(server: httpx.Client) -> None:
    answer = complete(server)
    listed = server.get("/v1/requests", params={"limit": 1}).json()["data"]
    assert (
        len(listed) == 1
        and listed[0]["finish_reason"] == "length"
        and listed[0]["completion_tokens"] == 12
    )
    line = server.get(f"/v1/requests/{listed[0]['id']}").json()
    assert (
        listed[0]["id"].startswith(answer.json()["id"])
        and server.get(f"/v1/requests/{answer.headers['x-request-id']}").json() == line
    )
    names = [event["name"] for event in line["events"]]
    assert names[0] == "queued" and names[-1] == "finished" and "prefill_chunk" in names
    decoded = [event["num_tokens"] for event in line["events"] if event["name"] == "decode_step"]
    assert sum(decoded) == 11 and line["prompt_tokens"] == listed[0]["prompt_tokens"] > 0
    chunks = [event["num_tokens"] for event in line["events"] if event["name"] == "prefill_chunk"]
    assert sum(chunks) + line["cached_tokens"] == line["prompt_tokens"]
    trace = server.get(f"/v1/requests/{listed[0]['id']}/trace").json()
    assert sum(event["name"] == "decode_step" for event in trace["traceEvents"]) == len(decoded)


@pytest.mark.parametrize("path", ["/v1/requests/nobody", "/v1/requests/nobody/trace"])
def test_an_unknown_request(server: httpx.Client, path: str) -> None:
    answer = server.get(path)
    assert (
        answer.status_code == 404
        and answer.json()["error"]["code"] == "request_not_found"
        and "nobody" in answer.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/engine/state?since=x", "since"),
        ("/v1/engine/state?since=-2", "since"),
        ("/v1/requests?limit=1025", "limit"),
        ("/v1/requests?limit=", "limit"),
    ],
)
def test_bad_numbers_are_refused_by_name(server: httpx.Client, path: str, param: str) -> None:
    answer = server.get(path)
    assert (
        answer.status_code == 400
        and answer.json()["error"]["param"] == param
        and "from" in answer.json()["error"]["message"]
    )
