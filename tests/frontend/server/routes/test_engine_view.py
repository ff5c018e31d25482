"""The engine's state and the requests' time lines, over HTTP from a real server.
May know: the session's server.
Must not know: how the page or `quire top` show it."""

import json
import time

import httpx2 as httpx
import pytest


def complete(server: httpx.Client, **more: object) -> httpx.Response:
    answer = server.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True, **more})
    assert answer.status_code == 200, answer.text
    return answer


def test_the_state_of_the_engine(server: httpx.Client) -> None:
    complete(server, prompt="Once upon a time there was a fox. " * 8)
    state = server.get("/v1/engine/state").json()
    assert state["model"] and state["max_model_len"] > 0 and state["block_size"] > 0 and state["uptime_s"] > 0 and state["num_queued"] == 0
    assert len(state["blocks"]) == -(-state["num_blocks"] // state["blocks_per_cell"]) <= 4096
    assert set(state["blocks"]) <= set("-.cus") and "c" in state["blocks"]
    assert state["counters"]["num_generation_tokens"] >= 12 and state["steps"][-1][0] == state["step"]
    newer = server.get("/v1/engine/state", params={"since": state["step"] - 2}).json()
    assert [step[0] for step in newer["steps"]][:2] == [state["step"] - 1, state["step"]]


def test_a_request_is_seen_while_it_runs(server: httpx.Client) -> None:
    seen: list[dict] = []
    with server.stream("POST", "/v1/completions", json={"prompt": "The sun", "max_tokens": 400, "ignore_eos": True, "stream": True}) as stream:
        lines = stream.iter_lines()
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        while not seen:
            seen = [r for r in server.get("/v1/engine/state").json()["requests"] if r["request_id"].startswith(request_id)]
            assert seen or next(lines, None) is not None
    assert seen[0]["state"] == "running" and seen[0]["max_tokens"] == 400 and 0 < seen[0]["num_computed_tokens"]


def test_a_finished_request_has_a_time_line_and_a_trace(server: httpx.Client) -> None:
    answer = complete(server)
    listed = server.get("/v1/requests", params={"limit": 1}).json()["data"]
    assert len(listed) == 1 and listed[0]["finish_reason"] == "length" and listed[0]["completion_tokens"] == 12
    line = server.get(f"/v1/requests/{listed[0]['id']}").json()
    assert listed[0]["id"].startswith(answer.json()["id"]) and server.get(f"/v1/requests/{answer.headers['x-request-id']}").json() == line
    names = [event["name"] for event in line["events"]]
    assert names[0] == "queued" and names[-1] == "finished" and "prefill_chunk" in names
    assert names.count("decode_step") == 11 and line["prompt_tokens"] == listed[0]["prompt_tokens"] > 0
    chunks = [event["num_tokens"] for event in line["events"] if event["name"] == "prefill_chunk"]
    assert sum(chunks) + line["cached_tokens"] == line["prompt_tokens"]
    trace = server.get(f"/v1/requests/{listed[0]['id']}/trace").json()
    assert sum(event["name"] == "decode_step" for event in trace["traceEvents"]) == 11


@pytest.mark.parametrize("streams", [True, False])
def test_a_request_whose_client_left_is_there_as_an_abort(server: httpx.Client, streams: bool) -> None:
    body = {"prompt": "The sea", "max_tokens": 1000, "ignore_eos": True, "stream": streams}
    name = f"left-{streams}"
    headers = {"x-request-id": name}
    if streams:
        with server.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
            next(stream.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/completions", json=body, headers=headers, timeout=0.3)
    deadline = time.monotonic() + 10
    while (answer := server.get(f"/v1/requests/{name}")).status_code == 404 and time.monotonic() < deadline:
        time.sleep(0.01)
    line = answer.json()
    assert line["finish_reason"] == "abort" and line["x_request_id"] == name and 0 < line["completion_tokens"] < 1000


@pytest.mark.parametrize("path", ["/v1/requests/nobody", "/v1/requests/nobody/trace"])
def test_an_unknown_request(server: httpx.Client, path: str) -> None:
    answer = server.get(path)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "request_not_found" and "nobody" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [("/v1/engine/state?since=x", "since"), ("/v1/engine/state?since=-2", "since"), ("/v1/requests?limit=1025", "limit"), ("/v1/requests?limit=", "limit")],
)
def test_bad_numbers_are_refused_by_name(server: httpx.Client, path: str, param: str) -> None:
    answer = server.get(path)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param and "from" in answer.json()["error"]["message"]
