"""/health, over HTTP."""

import socket
import time

import httpx2 as httpx
import psutil
import pytest
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server, slow_engine


def test_live_ready_version(server: httpx.Client) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/health/ready").json() == {"status": "ready", "model": "bundled"}
    assert set(server.get("/version").json()) == {"version"}


def test_a_long_step_is_healthy_but_an_endless_one_is_not() -> None:
    flags = ("--step-timeout-s", "2.5", "--drain-timeout-s", "0.1")
    with (
        slow_engine(30.0) as (address, engine),
        running_server("--engine", address, *flags) as client,
    ):
        with socket.create_connection(("127.0.0.1", client.base_url.port)) as asking:
            asking.sendall(
                b'POST /v1/completions HTTP/1.1\r\ncontent-length: 15\r\n\r\n{"prompt": [1]}'
            )
            began = time.monotonic()
            assert client.get("/health/ready").status_code == 200  # not yet running, or busy
            wait_until(lambda: client.get("/health/ready").status_code == 503, timeout_s=60)
            error = client.get("/health/ready").json()["error"]
            assert (
                error["code"] == "engine_stuck"
                and time.monotonic() - began > 2
                and client.get("/health").status_code == 200
            )
            engine.kill()  # it would wait for the step


def test_ping_is_health_and_load_counts_requests(server: httpx.Client) -> None:
    assert server.get("/ping").json() == server.post("/ping").json() == {"status": "ok"}
    assert server.get("/load").json() == {"server_load": 0}
    body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with server.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # keep a reference: a collected iterator closes the stream
        next(lines)
        assert server.get("/load").json() == {"server_load": 1}
    wait_until(lambda: server.get("/load").json() == {"server_load": 0})


@pytest.mark.slow
def test_a_stopped_engine_is_not_ready_and_then_replaced() -> None:
    with running_server("--step-timeout-s", "6") as client:
        (engine,) = psutil.Process(client.process.pid).children()
        assert client.get("/health/ready").status_code == 200
        engine.suspend()
        took_s = wait_until(lambda: client.get("/health/ready").status_code == 503, timeout_s=60)
        assert took_s < 5
        assert client.get("/health/ready").json()["error"]["code"] == "engine_stuck"
        wait_until(lambda: not engine.is_running(), timeout_s=60)
        wait_until(lambda: client.get("/health/ready").status_code == 200, timeout_s=60)
        answer = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
        assert answer.status_code == 200
        assert 'quire:engine_restarts_total{cause="hang"} 1.0' in client.get("/metrics").text
