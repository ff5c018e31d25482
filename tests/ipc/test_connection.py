"""A client's end of the wire: everything it opens is closed, whatever the engine does."""

import os
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import zmq
from quire.ipc.connection import Connection
from quire.ipc.errors import EngineStartError, InvalidParameterError
from quire.ipc.listener import TOKEN_VARIABLE, bind_listener, read_attach, send_answer
from quire.ipc.messages import Served, TurnedAway
from quire.ipc.sockets import Wire, connect_dealer
from quire.tests.fake_engine import wait_until

LIMIT = 2**20


@pytest.fixture
def connection():
    made = Connection(LIMIT)
    yield made
    made.close()


@pytest.fixture
def listener(tmp_path):
    """A daemon's listener. Yields (its address, a function that admits the next program in a
    thread).
    """
    address = f"ipc://{tmp_path}/listener"
    listener = bind_listener(address)
    listener.setblocking(True)
    accepted = []

    def admit(message) -> None:
        def run() -> None:
            program, _ = listener.accept()
            accepted.append((program, read_attach(program, None)))
            send_answer(program, message)

        threading.Thread(target=run).start()

    admit.accepted = accepted
    yield address, admit
    listener.close()
    for program, _ in accepted:
        program.close()


def is_readable(fd: int) -> bool:
    return bool(zmq.select([fd], [], [], 0)[0])


def test_a_child_that_never_responds_is_ended(connection):
    connection.spawn([sys.executable, "-c", "import time; time.sleep(100)"], LIMIT)
    connection.shutdown_timeout_s = 0.0
    connection.close()
    assert not psutil.pid_exists(connection.engine_pid)


def test_attach_and_leave(connection, listener):
    address, admit = listener
    admit(Served(7))
    connection.attach(address)
    [(program, attach)] = admit.accepted
    assert connection.engine_pid == 7 and not is_readable(connection.pidfd)
    wire = Wire(attach.wire_name, attach.key)
    assert wire == connection.wire
    with connect_dealer(connection.context, wire, LIMIT) as dealer:
        dealer.send(b"hello")
        assert connection.router.poll(60_000)
    connection.close()
    assert program.recv(1) == b""


def test_the_end_of_a_daemon_is_readable(connection, listener):
    address, admit = listener
    admit(Served(7))
    connection.attach(address)
    admit.accepted[0][0].close()
    assert is_readable(connection.pidfd)
    assert "is gone" in connection.describe_death()


def test_a_daemons_refusal(connection, listener):
    address, admit = listener
    admit(TurnedAway("no room for another"))
    with pytest.raises(EngineStartError, match="no room for another"):
        connection.attach(address)


def test_a_daemon_that_does_not_answer(connection, listener, monkeypatch):
    monkeypatch.setattr("quire.ipc.listener.ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(EngineStartError, match="did not answer within 0.2 s"):
        connection.attach(listener[0])


def test_no_listener(connection, tmp_path):
    with pytest.raises(EngineStartError, match="quire engine --listen"):
        connection.attach(f"ipc://{tmp_path}/listener")
    with pytest.raises(InvalidParameterError):
        connection.attach("tcp://localhost:1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "other"))
        other.listen()
        with pytest.raises(EngineStartError, match="no engine of this version"):
            connection.attach(f"ipc://{tmp_path}/other")


def test_a_token_file_that_cannot_be_used(connection, listener, tmp_path, monkeypatch):
    address, _ = listener
    with pytest.raises(InvalidParameterError, match="token_file: .*missing cannot be read"):
        connection.attach(address, f"{tmp_path}/missing")
    monkeypatch.setenv(TOKEN_VARIABLE, f"{tmp_path}/absent")
    with pytest.raises(InvalidParameterError, match="token_file: .*absent cannot be read"):
        connection.attach(address)


def test_strangers_are_counted(connection):
    connection.spawn([sys.executable, "-c", "import time; time.sleep(100)"], LIMIT)
    assert connection.num_rejected_peers == 0
    for address in (connection.wire.input_address, connection.wire.output_address):
        with connection.context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.reconnect_ivl = -1
            before = connection.num_rejected_peers
            stranger.connect(address)
            wait_until(lambda: connection.num_rejected_peers == before + 1)
    connection.shutdown_timeout_s = 0.0
    connection.close()
    assert connection.num_rejected_peers == 2


def test_close_in_a_fork_does_not_close_for_its_parent(connection, listener):
    address, admit = listener
    admit(Served(7))
    connection.attach(address)
    pid = os.fork()
    if pid == 0:
        connection.close()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(BlockingIOError):
        admit.accepted[0][0].recv(1, socket.MSG_DONTWAIT)


def test_close_does_not_wait_for_an_absent_engine(connection):
    begin = time.monotonic()
    connection.close()
    connection.close()
    assert time.monotonic() - begin < 8  # shutdown_timeout_s is 10


def test_attach_waits_for_a_daemon_between_bind_and_listen(connection, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "listener"))

        def listen() -> None:
            listener.listen()
            program, _ = listener.accept()
            with program:
                program.recv(10_000)
                send_answer(program, Served(7))

        threading.Timer(0.1, listen).start()
        connection.attach(f"ipc://{tmp_path}/listener")
        assert connection.engine_pid == 7


def test_attach_gives_up_on_the_file_of_a_dead_daemon(connection, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "listener"))
    with pytest.raises(EngineStartError, match="no engine listens"):
        connection.attach(f"ipc://{tmp_path}/listener")


def test_without_descriptors_there_is_an_error_where_zmq_would_abort() -> None:
    code = "from quire.ipc.connection import Connection; Connection(2**20)"
    command = ["prlimit", "--nofile=24:24", sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "and an engine takes 24" in ended.stderr
