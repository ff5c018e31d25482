"""The routes behind --admin: their effect on an engine, and their error without the flag."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from quire.frontend.server.app import make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.routes.admin import ACTIONS
from quire.frontend.server.state import ServerState
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server, slow_engine
from quire.tests.frontend.server.scripted import talk

LORA = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@pytest.fixture(scope="module")
def admin() -> Iterator[httpx.Client]:
    with (
        slow_engine(0.01) as (address, _),
        running_server("--engine", address, "--admin", "--drain-timeout-s", "1") as client,
    ):
        yield client


class Generating(threading.Thread):
    def __init__(self, client: httpx.Client, max_tokens: int):
        super().__init__()
        self._client, self._body = (
            client,
            {"prompt": [1, 2], "max_tokens": max_tokens, "ignore_eos": True},
        )
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._client.post("/v1/completions", json=self._body)


def is_running(client: httpx.Client) -> bool:
    return client.get("/v1/engine/state").json()["counters"]["num_running"] == 1


def test_pause_and_resume(admin: httpx.Client) -> None:
    assert admin.get("/is_paused").json() == {"is_paused": False}
    running = Generating(admin, 5000)
    wait_until(lambda: is_running(admin))
    assert admin.post("/pause").json() == {"status": "paused"}
    running.join(timeout=60)
    assert running.answer.json()["choices"][0]["finish_reason"] == "length"  # aborted
    assert admin.get("/is_paused").json() == {"is_paused": True}
    held = Generating(admin, 2)
    time.sleep(0.2)
    assert held.is_alive()
    assert admin.post("/resume").json() == {"status": "resumed"}
    held.join(timeout=60)
    assert held.answer.json()["usage"]["completion_tokens"] == 2


def test_pause_with_wait_finishes_running_requests(admin: httpx.Client) -> None:
    running = Generating(admin, 100)
    wait_until(lambda: is_running(admin) or not running.is_alive())
    admin.post("/pause?mode=wait")
    running.join(timeout=60)
    assert running.answer.json()["usage"]["completion_tokens"] == 100
    admin.post("/resume")
    assert admin.post("/pause?wait_for_inflight_requests=true&clear_cache=false").status_code == 200
    admin.post("/resume")


def test_sleep_and_wake(admin: httpx.Client) -> None:
    assert admin.post("/sleep?level=2").json() == {"status": "asleep"} and admin.get(
        "/is_sleeping"
    ).json() == {"is_sleeping": True}
    assert admin.post("/wake_up?tags=weights").json() == {"status": "asleep"}
    assert admin.post("/wake_up").json() == {"status": "awake"} and admin.get(
        "/is_sleeping"
    ).json() == {"is_sleeping": False}
    frozen = Generating(admin, 300)
    wait_until(lambda: is_running(admin))
    assert admin.post("/sleep").status_code == 200
    answer = admin.post("/pause?mode=wait")  # it could never finish
    assert answer.status_code == 409 and "wake_up" in answer.json()["error"]["message"]
    admin.post("/wake_up")
    frozen.join(timeout=60)
    assert frozen.answer.json()["usage"]["completion_tokens"] == 300


def test_the_prefix_cache(admin: httpx.Client) -> None:
    body = {"prompt": list(range(1, 64)), "max_tokens": 1}

    def num_cached() -> int:
        return admin.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    num_cached()
    assert num_cached() == 48
    assert admin.post("/reset_prefix_cache").json() == {"reset": True} and num_cached() == 0


def test_a_daemon_is_restarted_by_its_own_means(admin: httpx.Client) -> None:
    answer = admin.post("/restart_engines")
    assert answer.status_code == 409 and "child process" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mode=later", "mode"),
        ("/sleep?level=3", "level"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/pause?mode=keep&clear_cache=", "clear_cache"),
        ("/pause?wait_for_inflight_requests=2", "wait_for_inflight_requests"),
        ("/pause?mod=keep", "mod"),
        ("/resume?mode=keep", "mode"),
        ("/wake_up?tags=all", "tags"),
        ("/wake_up?tags=weights&tags=all", "tags"),
        ("/reset_prefix_cache?reset_running_requests=maybe", "reset_running_requests"),
        ("/restart_engines?drain_timeout=soon", "drain_timeout"),
    ],
)
def test_a_refused_call_changes_nothing(admin: httpx.Client, path: str, param: str) -> None:
    running = Generating(admin, 40)
    wait_until(lambda: is_running(admin) or not running.is_alive())
    answer = admin.post(path)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert admin.get("/is_paused").json() == {"is_paused": False}
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}
    running.join(timeout=60)
    assert running.answer.json()["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("path", ACTIONS)
def test_actions_read_every_parameter_before_calling_the_engine(path: str) -> None:
    """The engine of this app raises AttributeError on every call."""
    method, _, readers = ACTIONS[path]
    state = ServerState(ServerConfig(admin=True), "m")
    state.engine = SimpleNamespace(errored=False)
    for name in [*readers, "unknown"]:
        answer = talk(make_app(state), lambda client: client.request(method, f"{path}?{name}=?"))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    ("path", "method"),
    [
        *((path, method) for path, (method, *_) in ACTIONS.items()),
        *((path, "POST") for path in LORA),
    ],
)
def test_without_the_flag(server: httpx.Client, path: str, method: str) -> None:
    answer = server.request(method, path)
    assert (
        answer.status_code == 403
        and answer.json()["error"]["code"] == "admin_disabled"
        and "--admin" in answer.json()["error"]["message"]
    )
