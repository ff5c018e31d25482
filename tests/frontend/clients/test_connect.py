"""Invalid or unreachable addresses are refused."""

from __future__ import annotations

import pytest
from quire.frontend.clients.connect import make_client
from quire.ipc.errors import (
    EngineDeadError,
    InvalidParameterError,
)
from quire.tests.fakes import make_config


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5555", "proces", "ipc://", "ipc://@abstract", "ipc:///" + "x" * 120],
)
def test_make_client_refuses_other_addresses(address):
    with pytest.raises(InvalidParameterError) as caught:
        make_client(make_config(), address)
    assert caught.value.parameter == "engine"


def test_make_client_finds_no_daemon(tmp_path):
    with pytest.raises(EngineDeadError, match="no engine listens"):
        make_client(make_config(), f"ipc://{tmp_path}/nobody.sock")
