"""Restarts that a program asks for in blocking code."""

from __future__ import annotations

import pytest
from quire.ipc.errors import EngineDeadError, EngineUsageError
from quire.tests.fake_engine import daemon
from quire.tests.fakes import make_config
from quire.tests.frontend.supervision.test_supervised_client import (
    Blocking,
    assert_expected,
    some_requests,
)


def test_blocking_code_replaces_its_engine_under_requests() -> None:
    engine, restarts = Blocking(hf_overrides={"delay_s": 0.002}), []

    def on_output() -> None:
        if engine.client.engine_pid not in restarts and len(restarts) < 2:
            restarts.append(engine.client.engine_pid)
            engine.llm.restart_engines()

    try:
        requests = some_requests(6)
        assert_expected(requests, engine.generate(requests, on_output), engine.llm.config)
        assert engine.client.engine_pid not in restarts and len(restarts) == 2
        assert engine.client.restarts.by_cause == {"request": 2}
        engine.llm.restart_engines()  # idle
        assert engine.call("ping") == "pong"
    finally:
        engine.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.llm.restart_engines()


def test_a_daemon_is_not_restarted_by_its_clients(tmp_path) -> None:
    with daemon(tmp_path, make_config()) as (address, _):
        engine = Blocking(address)
        try:
            with pytest.raises(EngineUsageError, match="needs an engine in a child process"):
                engine.llm.restart_engines()
            assert engine.call("ping") == "pong"
        finally:
            engine.close()
