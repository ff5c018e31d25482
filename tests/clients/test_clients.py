"""Every client that is installed, against one server over the bundled model.
May know: environments.py.
Must not know: any client.

Not run by default: `python tests/clients/environments.py install && pytest -m clients`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.tests.clients.environments import SERVER_FLAGS, Client, clients
from quire.tests.frontend.server.conftest import running_server

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    with running_server(*SERVER_FLAGS) as server:
        yield str(server.base_url).rstrip("/")


@pytest.mark.parametrize("client", clients(), ids=lambda client: client.name)
def test_a_client(client: Client, request: pytest.FixtureRequest) -> None:
    if not client.python.exists():
        pytest.skip(f"not installed: python tests/clients/environments.py install {client.name}")
    found = client.run(request.getfixturevalue("address"), Path(quire.__file__).parent / "frontend" / "bundled_model")
    assert not found["failed"], "\n".join(f"{name}:\n{problem}" for name, problem in found["failed"].items())
    assert found["passed"]
