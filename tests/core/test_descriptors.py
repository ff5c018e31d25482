"""A daemon that has no descriptors for another client."""

from __future__ import annotations

import contextlib
import resource
import time

import pytest
from quire.frontend.clients.mp_client import MPClient
from quire.ipc.errors import EngineDeadError, EngineStartError
from quire.ipc.messages import FinishReason
from quire.tests.core.engine_clients import collect, make_request
from quire.tests.fake_engine import daemon
from quire.tests.fakes import make_config


def open_soon(open_client, address: str) -> MPClient:
    """Open a client of a daemon that is about to have room for one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(EngineStartError):
            return open_client(address)
        time.sleep(0.01)
    raise AssertionError("there is still no room")


def test_a_daemon_without_descriptors_turns_new_clients_away(tmp_path, open_client):
    with daemon(tmp_path, make_config(hf_overrides={"delay_s": 0.002})) as (address, process):
        first = open_client(address)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, 128))
        first.add_request(make_request("all the time", max_tokens=240))
        clients = []
        with pytest.raises(EngineStartError, match="clients, and no descriptors for another.*128"):
            for _ in range(40):
                clients.append(open_client(address))
        assert len(clients) >= 10
        for _ in range(20):
            with pytest.raises(EngineStartError, match="no descriptors"):
                open_client(address)
        assert len(collect(first, "all the time")["all the time"][0]) == 240
        # a client that leaves makes room
        clients.pop().shutdown()
        clients.append(open_soon(open_client, address))
        clients[-1].shutdown()
        replacement = open_soon(open_client, address)
        replacement.add_request(make_request("last", max_tokens=3))
        assert len(collect(replacement, "last")["last"][0]) == 3
        assert process.poll() is None


def test_idle_clients_of_a_daemon_without_descriptors_make_room(tmp_path, open_client):
    overrides = {"delay_s": 0.005, "idle_s": 0.3}
    config = make_config(hf_overrides=overrides, max_model_len=16_000, num_gpu_blocks_override=1100)
    with daemon(tmp_path, config) as (address, process):
        busy, idle = open_client(address), open_client(address)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (128, 128))
        busy.add_request(make_request("all the time", max_tokens=15_000))
        for _ in range(40):  # there are descriptors for fewer than 20
            last = open_soon(open_client, address)
        with pytest.raises(EngineDeadError, match="needed the descriptors of a client that was"):
            idle.call_utility("ping")
        busy.abort_requests(["all the time"])
        tokens, end = collect(busy, "all the time")["all the time"]
        assert len(tokens) > 20 and end.reason == FinishReason.ABORT
        last.call_utility("pause", "keep")
        for _ in range(40):
            other = open_soon(open_client, address)
        assert last.call_utility("is_paused") and other.call_utility("is_paused")
        assert not is_served(busy)
        assert process.poll() is None


def is_served(client: MPClient) -> bool:
    with contextlib.suppress(EngineDeadError):
        return client.call_utility("ping") == "pong"
    return False
