"""Clients that disconnect, and queues: over HTTP, with an engine whose steps are slow enough to
count.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from quire.frontend.clients.mp_client import MPClient
from quire.tests.fake_engine import open_blocking, stop, wait_until
from quire.tests.fakes import make_config
from quire.tests.frontend.server.conftest import running_server, slow_engine

STEP_S = 0.15
ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 5000, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow() -> Iterator[tuple[httpx.Client, MPClient]]:
    """A server that admits two completions and queues two calls, and its engine."""
    flags = (
        "--max-concurrent-requests",
        "2",
        "--max-queued-requests",
        "2",
        "--max-queued-tokens",
        "100",
        "--drain-timeout-s",
        "1",
    )
    with slow_engine(STEP_S) as (address, _), running_server("--engine", address, *flags) as client:
        engine = open_blocking(MPClient.start(make_config(), address))
        yield client, engine
        engine.shutdown()


class PendingPost:
    """A POST whose answer has not been read."""

    def __init__(self, client: httpx.Client, body: dict):
        raw = json.dumps(body).encode()
        self.socket = socket.create_connection(("127.0.0.1", client.base_url.port))
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(raw), raw)
        )

    def status(self) -> int:
        self.socket.settimeout(30)
        return int(self.socket.recv(65536).split()[1])

    def leave(self) -> None:
        self.socket.close()


def num_in_engine(engine: MPClient) -> int:
    return len(engine.call_utility("scheduler_state")["requests"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_disconnect_aborts_within_two_steps(
    slow: tuple[httpx.Client, MPClient], stream: bool, n: int
) -> None:
    client, engine = slow
    asking = PendingPost(client, ENDLESS | {"stream": stream, "n": n, "temperature": 1})
    wait_until(lambda: engine.call_utility("get_metrics")["num_running"] == n)
    before = engine.call_utility("get_metrics")["num_generation_tokens"]
    # the engine is stopped until the server has seen the disconnect, which may take it long
    stop(engine.engine_pid)
    asking.leave()
    wait_until(lambda: client.get("/load").json() == {"server_load": 0})
    os.kill(engine.engine_pid, signal.SIGCONT)
    wait_until(lambda: num_in_engine(engine) == 0)
    # the step that ran at the disconnect, the one before the server's message arrived, and one that
    # may lie between the two polls
    assert engine.call_utility("get_metrics")["num_generation_tokens"] - before <= 3 * n


def test_the_queue_over_http(slow: tuple[httpx.Client, MPClient]) -> None:
    client, engine = slow
    running = [PendingPost(client, ENDLESS) for _ in range(2)]
    wait_until(lambda: num_in_engine(engine) == 2)
    waiting = [PendingPost(client, ENDLESS)]
    wait_until(lambda: num_queued(client) == 1)
    answer = client.post("/v1/completions", json=ENDLESS | {"prompt": [1] * 99})
    assert answer.status_code == 429 and "tokens" in answer.json()["error"]["message"]
    waiting.append(PendingPost(client, ENDLESS))
    wait_until(lambda: num_queued(client) == 2)
    for body in (ENDLESS, ENDLESS | {"stream": True}):  # a refused stream gets a plain answer too
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 429 and 1 <= int(answer.headers["retry-after"]) <= 600
        assert answer.json()["error"] | {"message": ""} == {
            "message": "",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    assert num_in_engine(engine) == 2
    # a waiting client that disconnects makes room for another, and its request never reaches the
    # engine
    waiting[0].leave()
    short = threading.Thread(
        target=client.post, args=("/v1/completions",), kwargs={"json": ENDLESS | {"max_tokens": 1}}
    )
    wait_until(lambda: num_queued(client) == 1)
    short.start()
    wait_until(lambda: num_queued(client) == 2)
    running[0].leave()
    running[1].leave()
    short.join(timeout=60)
    assert not short.is_alive()
    wait_until(lambda: num_in_engine(engine) == 1)  # the other request in the queue
    waiting[1].leave()
    wait_until(lambda: num_in_engine(engine) == 0)


def num_queued(client: httpx.Client) -> int:
    return int(re.search(r"quire:num_requests_queued\S* (\d+)", client.get("/metrics").text)[1])


def test_several_prompts_in_one_call_are_one_request_of_the_queue(
    slow: tuple[httpx.Client, MPClient],
) -> None:
    client, engine = slow
    answer = client.post(
        "/v1/completions",
        json={"prompt": [[1, number] for number in range(2, 12)], "max_tokens": 1},
    )
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 10
    assert num_in_engine(engine) == 0


def test_the_same_id_twice_at_once(slow: tuple[httpx.Client, MPClient]) -> None:
    client, _ = slow
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(
            client.post(
                "/v1/completions",
                json=ENDLESS | {"max_tokens": 3},
                headers={"x-request-id": "again"},
            )
        )

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [answer.status_code for answer in answers] == [200, 200] and {
        answer.headers["x-request-id"] for answer in answers
    } == {"again"}


def test_a_disconnect_after_half_a_body(slow: tuple[httpx.Client, MPClient]) -> None:
    client, _ = slow
    connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-length", "1000")
    connection.endheaders(b'{"prompt": ')
    connection.close()
    wait_until(
        lambda: "/v1/completions left" in client.log() or "/v1/completions 400" in client.log()
    )
    assert "Traceback" not in client.log()
