"""The input thread: messages, bad frames, programs that attach and leave or die."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from quire.ipc import engine_input as events
from quire.ipc.codec import Decoder, Encoder
from quire.ipc.engine_input import EngineInput
from quire.ipc.messages import (
    PROTOCOL,
    AbortRequests,
    Attach,
    Config,
    Detach,
    EngineCoreRequest,
    EngineMessage,
    Hello,
    Shutdown,
    UtilityCall,
)
from quire.ipc.params import SamplingParams
from quire.ipc.process import SignalPipe
from quire.ipc.sockets import (
    ENGINE_IDENTITY,
    bind_listener,
    bind_router,
    connect_push,
    make_context,
    receive,
)
from quire.tests.fake_engine import wait_until
from quire.tests.fakes import make_config

LIMIT = 2**20
REQUEST = EngineCoreRequest("r", [1, 2], SamplingParams(seed=1))


class Client:
    """A program at the client's end of the sockets."""

    def __init__(self, context, path):
        self.input_address, self.output_address = f"ipc://{path}.in", f"ipc://{path}.out"
        self.router = bind_router(context, self.input_address, LIMIT)
        self.encoder = Encoder(LIMIT)

    def hello(self) -> Hello | None:
        if not self.router.poll(5000):
            return None
        identity, *frames = receive(self.router)
        assert bytes(identity) == ENGINE_IDENTITY
        return Decoder(EngineMessage, LIMIT).decode(frames)

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
    """An EngineInput with a listener. Yields (it, the socket for attaching, a function that makes
    clients).
    """
    address = f"ipc://{tmp_path}/door"
    signals = SignalPipe()
    input_ = EngineInput(context, LIMIT, signals)
    input_.serve_listener(bind_listener(context, address), address)
    input_.start()
    door = connect_push(context, address)
    clients = []

    def attach(pid: int | None = None) -> Client:
        client = Client(context, tmp_path / str(len(clients)))
        clients.append(client)
        door.send_multipart(
            client.encoder.encode(
                Attach(PROTOCOL, pid or os.getpid(), client.input_address, client.output_address)
            )
        )
        assert client.hello() == Hello(PROTOCOL, os.getpid())
        assert next_event(input_) == events.ClientJoined(len(clients) - 1, client.output_address)
        return client

    yield input_, door, attach
    input_.close()
    signals.close()
    assert not (tmp_path / "door").exists()
    door.close(linger=0)
    for client in clients:
        client.router.close(linger=0)


def next_event(input_: EngineInput) -> events.Event:
    return input_.events.get(timeout=5)


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
    "message",
    [Shutdown(), Config(make_config()), Attach(PROTOCOL, 1, "ipc:///x", "ipc:///y")],
    ids=lambda m: type(m).__name__,
)
def test_a_daemons_client_is_not_its_parent(daemon, message):
    input_, _, attach = daemon
    client = attach()
    client.send(message, REQUEST)
    assert next_event(input_).message == REQUEST and input_.num_bad_frames == 1


def test_detach_and_death(daemon):
    input_, _, attach = daemon
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stays, leaves, dies = attach(), attach(), attach(program.pid)
    leaves.send(Detach())
    assert next_event(input_) == events.ClientLeft(1)
    program.kill()
    assert next_event(input_) == events.ClientLeft(2)
    program.wait()
    program.stdin.close()
    with pytest.raises(zmq.ZMQError):
        wait_until(lambda: dies.send(REQUEST))  # the engine has closed its end
    stays.send(REQUEST)
    assert next_event(input_) == events.FromClient(0, REQUEST)


def num_pidfds() -> int:
    """Count the pidfds that this process holds."""
    num_found = 0
    for fd in os.listdir("/proc/self/fdinfo"):
        with contextlib.suppress(FileNotFoundError):
            num_found += "\nPid:" in Path(f"/proc/self/fdinfo/{fd}").read_text()
    return num_found


def test_clients_that_close_without_detaching_leak_no_descriptors(daemon, context, tmp_path):
    """Their program continues to run, so no death is reported. The next attach closes the
    descriptors.
    """
    input_, door, _ = daemon
    num_before = num_pidfds()
    for number in range(4):
        client = Client(context, tmp_path / f"short-{number}")
        attach = Attach(PROTOCOL, os.getpid(), client.input_address, client.output_address)
        door.send_multipart(client.encoder.encode(attach))
        assert client.hello() is not None
        if number:
            assert next_event(input_) == events.ClientLeft(number - 1)
        assert next_event(input_) == events.ClientJoined(number, client.output_address)
        client.router.close(linger=0)
        (tmp_path / f"short-{number}.in").unlink()  # as Connection.close removes its directory
        assert num_pidfds() == num_before + 1


@pytest.mark.parametrize(
    "attach_message",
    [
        Attach(PROTOCOL, os.getpid(), "tcp://127.0.0.1:1", "ipc:///x"),
        Attach(PROTOCOL, os.getpid(), "ipc:///x", "nonsense"),
        Attach(PROTOCOL, 2**22 + 1, "ipc:///x", "ipc:///y"),  # no such process
        Attach(PROTOCOL, -1, "ipc:///x", "ipc:///y"),
        Attach(PROTOCOL, 2**80, "ipc:///x", "ipc:///y"),
        REQUEST,
    ],
)
def test_a_bad_attach_affects_no_other_client(daemon, attach_message):
    input_, door, attach = daemon
    attach()
    fds = len(os.listdir("/proc/self/fd"))
    try:
        door.send_multipart(Encoder(LIMIT).encode(attach_message))
    except OverflowError:  # msgpack has no such integer, so it is encoded by hand
        door.send_multipart([b"\x95\xa6attach\x01\xcb\x7f\xf0\0\0\0\0\0\0\xa1x\xa1y"])
    wait_until(lambda: input_.num_bad_frames == 1)
    assert len(os.listdir("/proc/self/fd")) == fds
    client = attach()
    client.send(REQUEST)
    assert next_event(input_).message == REQUEST


def test_sigterm_stops_attaching_and_is_reported(context, tmp_path):
    previous = signal.getsignal(signal.SIGTERM)
    signals = SignalPipe(signal.SIGTERM)
    try:
        input_ = EngineInput(context, LIMIT, signals)
        input_.serve_listener(
            bind_listener(context, f"ipc://{tmp_path}/door"), f"ipc://{tmp_path}/door"
        )
        input_.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert next_event(input_) == events.LeaveSignal()
        wait_until(lambda: not (tmp_path / "door").exists())
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
