"""The input thread: messages, bad frames, programs that attach and leave or die."""

import os
import signal
import socket
import subprocess
import sys
from queue import SimpleQueue

import msgspec
import pytest
from quire.ipc import engine_input as events
from quire.ipc.codec import MessageDecoder, MessageEncoder, make_codec
from quire.ipc.engine_input import DESCRIPTORS_PER_CLIENT, MAX_PENDING, EngineInput
from quire.ipc.listener import attach, bind_listener, connect_to_daemon, network_namespace
from quire.ipc.messages import (
    PROTOCOL,
    AbortRequests,
    Attach,
    ClientMessage,
    Config,
    EngineCoreRequest,
    EngineMessage,
    Hello,
    Served,
    Shutdown,
    UtilityCall,
)
from quire.ipc.params import SamplingParams
from quire.ipc.process import SignalPipe
from quire.ipc.sockets import ENGINE_IDENTITY, make_context, receive
from quire.tests.fake_engine import wait_until
from quire.tests.fakes import make_config
from quire.tests.wires import ClientEnds

LIMIT = 2**20
TOKEN = b"sixteen bytes...or more"
REQUEST = EngineCoreRequest("r", [1, 2], SamplingParams(seed=1))


class Client:
    """A program at the client's end of the sockets."""

    def __init__(self, context, address, token=b""):
        self.ends = ClientEnds(context, LIMIT)
        self.wire, self.router = self.ends.wire, self.ends.router
        self.encoder = MessageEncoder(LIMIT)
        self.connection = connect_to_daemon(address)
        assert attach(self.connection, self.wire, token) == Served(os.getpid())

    def hello(self) -> Hello | None:
        if not self.router.poll(60_000):
            return None
        identity, *frames = receive(self.router)
        assert bytes(identity) == ENGINE_IDENTITY
        return MessageDecoder(EngineMessage, LIMIT).decode(frames)

    def send(self, *messages) -> None:
        for message in messages:
            self.send_frames(self.encoder.encode(message))

    def send_frames(self, frames) -> None:
        self.router.send_multipart([ENGINE_IDENTITY, *frames])


@pytest.fixture
def context():
    with make_context() as made:
        yield made


@pytest.fixture
def daemon(context, tmp_path):
    """An EngineInput with a listener. Yields (it, its address, a function that makes clients)."""
    address = f"ipc://{tmp_path}/listener"
    signals = SignalPipe()
    input_ = EngineInput(
        context, make_codec(ClientMessage, LIMIT), signals, SimpleQueue(), lambda *_: None
    )
    input_.serve_listener(bind_listener(address), address, None)
    input_.start()
    clients = []

    def attach() -> Client:
        client = Client(context, address)
        clients.append(client)
        assert client.hello() == Hello(PROTOCOL, os.getpid())
        assert next_event(input_) == events.ClientJoined(len(clients) - 1, client.wire)
        return client

    yield input_, address, attach
    input_.close()
    input_.close_connections()
    signals.close()
    assert not (tmp_path / "listener").exists()
    for client in clients:
        client.ends.close()
        client.connection.close()


def next_event(input_: EngineInput) -> events.Event:
    return input_.events.get(timeout=60)


def test_messages_arrive_in_order_and_aborts_are_also_queued_separately(daemon):
    input_, _, attach = daemon
    client = attach()
    client.send(REQUEST, UtilityCall(1, "ping"), AbortRequests(["r"]))
    assert [next_event(input_).message for _ in range(3)] == [
        REQUEST,
        UtilityCall(1, "ping"),
        AbortRequests(["r"]),
    ]
    assert list(input_.aborts) == [(0, ["r"])]


def test_a_bad_frame_is_dropped_and_its_sender_reported(daemon):
    input_, _, attach = daemon
    client = attach()
    client.send_frames([b"\xc1"])
    client.send_frames(
        client.encoder.encode(EngineCoreRequest("mine", [1, "two"], SamplingParams()))
    )
    client.send_frames([*client.encoder.encode(UtilityCall(7, "ping")), b"one frame more"])
    client.send(REQUEST)
    refused = [next_event(input_), next_event(input_)]
    assert [event.identity for event in refused] == ["mine", 7] and "`int`" in refused[0].error
    assert next_event(input_).message == REQUEST
    assert input_.num_bad_frames == 3


@pytest.mark.parametrize(
    "message", [Shutdown(), Config(make_config())], ids=lambda m: type(m).__name__
)
def test_a_daemons_client_is_not_its_parent(daemon, message):
    input_, _, attach = daemon
    client = attach()
    client.send(message, REQUEST)
    assert next_event(input_).message == REQUEST and input_.num_bad_frames == 1


# Attaches and prints the line "attached"; a fork of it then keeps its descriptors open.
PROGRAM = """
import os, sys, time
from quire.ipc.connection import Connection
connection = Connection(2**20)
connection.attach(sys.argv[1])
if os.fork() == 0:
    time.sleep(3)
    os._exit(0)
print("attached", flush=True)
input()
connection.close()
print("closed", flush=True)
input()
"""


@pytest.mark.parametrize("leaves", ["dies", "closes"])
def test_a_client_that_leaves(daemon, leaves):
    input_, address, attach = daemon
    stays = attach()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert program.stdout.readline() == b"attached\n"
    assert isinstance(next_event(input_), events.ClientJoined)
    if leaves == "dies":
        program.kill()
    else:
        program.stdin.write(b"\n")
        program.stdin.flush()
    assert next_event(input_) == events.ClientLeft(1)
    program.kill()
    program.wait()
    program.stdin.close()
    program.stdout.close()
    stays.send(REQUEST)
    assert next_event(input_) == events.FromClient(0, REQUEST)


def test_clients_that_leave_leak_no_descriptors(daemon):
    input_, _, attach = daemon
    attach()
    num_before = None
    for number in range(1, 5):
        client = attach()
        client.connection.close()
        client.ends.close()
        assert next_event(input_) == events.ClientLeft(number)
        num_before = num_before or num_open()
        wait_until(lambda: num_open() <= num_before)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def send_raw(address: str, data: bytes) -> socket.socket:
    listener = connect_to_daemon(address)
    listener.settimeout(60)
    listener.send(data)
    return listener


def packed(**changes) -> bytes:
    """An Attach with some fields changed."""
    fields = ["attach", PROTOCOL, "0" * 32, b"k" * 40, network_namespace(), b""]
    names = ["tag", *Attach.__struct_fields__]
    assert set(changes) <= set(names)
    return msgspec.msgpack.encode([changes.get(n, v) for n, v in zip(names, fields, strict=True)])


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        b"\xff" * 8192,
        b"\x91" * 8000,
        packed(tag="nonsense"),
        packed(wire_name="/tmp/somebody's"),
        packed(wire_name="../../x"),
        packed(key=b"short"),
        packed(key=b"\0" * 40),
        packed(network_namespace=-1.5),
        MessageEncoder(LIMIT).encode(REQUEST)[0],
    ],
)
def test_a_bad_attach_affects_no_other_client(daemon, data):
    input_, address, attach = daemon
    attach()
    fds = num_open()
    with send_raw(address, data) as listener:
        assert listener.recv(1000) == b""
    assert input_.num_bad_frames == 1
    wait_until(lambda: num_open() == fds)
    client = attach()
    client.send(REQUEST)
    assert next_event(input_).message == REQUEST


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (packed(protocol=PROTOCOL - 1), b"versions of quire differ"),
        (packed(network_namespace=1), b"different network namespaces"),
    ],
)
def test_a_program_learns_why_it_is_not_served(daemon, data, cause):
    input_, address, attach = daemon
    with send_raw(address, data) as listener:
        assert cause in listener.recv(1000)
        assert listener.recv(1000) == b""
    attach()


def test_a_client_learns_of_the_end_after_its_last_outputs(daemon):
    input_, _, attach = daemon
    client = attach()
    input_.close()
    client.connection.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.connection.recv(1)
    input_.close_connections()
    assert client.connection.recv(1) == b""


def test_programs_that_say_nothing(daemon, monkeypatch):
    """They neither keep others out nor descriptors."""
    monkeypatch.setattr("quire.ipc.engine_input.ATTACH_TIMEOUT_S", 0.3)
    input_, address, attach = daemon
    attach()
    fds = num_open()
    silent = [connect_to_daemon(address) for _ in range(3 * MAX_PENDING)]
    attach()
    for listener in silent:
        listener.settimeout(60)
        assert listener.recv(1) == b""
        listener.close()
    assert num_open() <= fds + DESCRIPTORS_PER_CLIENT + 5  # with the client's own ends
    attach()


def test_sigterm_stops_attaching_and_is_reported(context, tmp_path):
    previous = signal.getsignal(signal.SIGTERM)
    signals = SignalPipe(signal.SIGTERM)
    try:
        input_ = EngineInput(
            context, make_codec(ClientMessage, LIMIT), signals, SimpleQueue(), lambda *_: None
        )
        address = f"ipc://{tmp_path}/listener"
        input_.serve_listener(bind_listener(address), address, None)
        input_.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert next_event(input_) == events.LeaveSignal()
        wait_until(lambda: not (tmp_path / "listener").exists())
        input_.close()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, previous)
        signals.close()


def test_a_failing_thread_is_reported(daemon):
    input_, _, attach = daemon
    client = attach()
    input_._on_message = None  # any error in Quire's own code
    client.send(REQUEST)
    assert isinstance(next_event(input_).error, TypeError)
