"""The server's process: its port before its model, the way out.
May know: serving.py, the session's server.
Must not know: routes."""


import httpx2 as httpx
import pytest

from quire.frontend.server.config import ServerConfig
from quire.frontend.server.serving import open_port
from quire.ipc.errors import InvalidParameterError
from quire.tests.frontend.server.conftest import running_server, wait_until_ready


def test_the_port_is_open_while_the_model_loads() -> None:
    with running_server(wait=False) as client:
        answer = client.get("/v1/models")
        if answer.status_code != 200:  # on a fast machine it may be there already
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_loading" and int(answer.headers["retry-after"]) >= 1
        assert client.get("/health").status_code == 200
        wait_until_ready(client)
        assert client.get("/v1/models").status_code == 200


def test_ports() -> None:
    with open_port(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        with pytest.raises(InvalidParameterError, match=f"127.0.0.1:{port}"):
            open_port(ServerConfig(port=port))
    with pytest.raises(InvalidParameterError) as caught:
        open_port(ServerConfig(host="no.such.host.invalid"))
    assert caught.value.parameter == "host"


def test_the_session_server_is_ready(server: httpx.Client) -> None:
    assert server.get("/health/ready").json()["status"] == "ready"
