"""A client's end of the wire: everything it opens is closed, whatever the engine does."""

import os
import socket
import sys
import threading
import time

import psutil
import pytest
from quire.ipc.codec import Decoder
from quire.ipc.connection import Connection
from quire.ipc.errors import EngineStartError, InvalidParameterError
from quire.ipc.messages import Attach, ClientMessage, Detach
from quire.ipc.sockets import bind_listener, connect_dealer, receive

LIMIT = 2**20


@pytest.fixture
def connection():
    made = Connection(LIMIT)
    yield made
    made.close()
    assert not made.directory.path.exists()


def test_a_child_that_never_responds_is_ended(connection):
    connection.spawn([sys.executable, "-c", "import time; time.sleep(100)"], LIMIT)
    connection.shutdown_timeout_s = 0.0
    connection.close()
    assert not psutil.pid_exists(connection.engine_pid)


def test_attach_and_detach(connection, tmp_path):
    decoder = Decoder(ClientMessage, LIMIT)
    with bind_listener(connection.context, f"ipc://{tmp_path}/door") as door:
        connection.attach(f"ipc://{tmp_path}/door")
        assert connection.engine_pid == os.getpid()
        assert door.poll(5000)
        message = decoder.decode(receive(door))
        assert isinstance(message, Attach) and message.pid == os.getpid()
        with connect_dealer(connection.context, message.input_address, LIMIT) as dealer:
            dealer.send(b"hello")
            assert connection.router.poll(5000)
            connection.send(Detach())
            assert dealer.poll(5000) and decoder.decode(receive(dealer)) == Detach()
    assert "is gone" in connection.describe_death()


def test_no_listener(connection, tmp_path):
    with pytest.raises(EngineStartError, match="quire engine --listen"):
        connection.attach(f"ipc://{tmp_path}/door")
    with pytest.raises(InvalidParameterError):
        connection.attach("tcp://localhost:1")


def test_close_in_a_fork_does_not_close_for_its_parent(connection):
    pid = os.fork()
    if pid == 0:
        connection.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert connection.directory.path.exists()


def test_close_does_not_wait_for_an_absent_engine(connection):
    begin = time.monotonic()
    connection.close()
    connection.close()
    assert time.monotonic() - begin < 2


def test_attach_waits_for_a_daemon_between_bind_and_listen(connection, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(tmp_path / "door"))
        threading.Timer(0.1, door.listen).start()
        connection.attach(f"ipc://{tmp_path}/door")
        assert connection.engine_pid == os.getpid()


def test_attach_gives_up_on_the_file_of_a_dead_daemon(connection, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(tmp_path / "door"))
    with pytest.raises(EngineStartError, match="no engine listens"):
        connection.attach(f"ipc://{tmp_path}/door")
