"""Clients of engines with the fake executor."""

from __future__ import annotations

import pytest
from quire.frontend.clients.mp_client import MPClient
from quire.tests.fake_engine import COMMAND, open_blocking
from quire.tests.fakes import make_config


@pytest.fixture
def open_client():
    clients = []

    def open_(engine: str = "process", **arguments) -> MPClient:
        clients.append(
            open_blocking(
                MPClient.start(
                    make_config(startup_timeout_s=120.0, **arguments), engine, command=COMMAND
                )
            )
        )
        return clients[-1]

    yield open_
    for client in clients:
        client.shutdown()
