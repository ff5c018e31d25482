"""Every installed client against one server with the bundled model. Not run by default: `python
tests/clients/environments.py install && pytest -m clients`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import quire
from _pytest.mark import ParameterSet
from quire.tests.clients.environments import SERVER_FLAGS, Client, clients
from quire.tests.frontend.server.conftest import running_server

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the address of a server with the client's flags. Clients with the same flags
    share it.
    """
    with running_server(*SERVER_FLAGS, *request.param) as server:
        yield str(server.base_url).rstrip("/")


def case(client: Client) -> ParameterSet:
    why = f"not installed: python tests/clients/environments.py install {client.name}"
    return pytest.param(
        client,
        client.flags,
        id=client.name,
        marks=pytest.mark.skipif(not client.python.exists(), reason=why),
    )


@pytest.mark.parametrize(
    ("client", "address"), [case(client) for client in clients()], indirect=["address"]
)
def test_a_client(client: Client, address: str) -> None:
    found = client.run(address, Path(quire.__file__).parent / "frontend" / "bundled_model")
    assert not found["failed"], "\n".join(
        f"{name}:\n{problem}" for name, problem in found["failed"].items()
    )
    assert found["passed"]
