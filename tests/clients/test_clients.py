"""Every installed client against one server with the bundled model. Not run by default: `python
tests/clients/environments.py install && pytest -m clients`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import quire
from _pytest.mark import ParameterSet
from quire.tests.clients.environments import Client, clients, server_of

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the address of a server with the flags and the model of a client. Clients share it
    where they are the same.
    """
    with server_of(*request.param) as found:
        yield found


def case(client: Client) -> ParameterSet:
    why = f"not installed: python tests/clients/environments.py install {client.name}"
    return pytest.param(
        client,
        (client.flags, client.model),
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
